"""The target of an export: the pipeline that was trained, described by its folder without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import diffusers
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wfm_ds.checkpoint.pipeline_folder import CALL, components, read_index
from wfm_ds.checkpoint.tensor_file import Spec
from wfm_ds.errors import ModelError
from wfm_ds.models.base import matches, stock_argument
from wfm_ds.models.loading import read_json
from wfm_ds.models.variants import index_file, variant_to_load

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel

WEIGHTS = "diffusion_pytorch_model"  # the file stem that diffusers expects


class ExportNote(Protocol):
    """The information in a checkpoint from which exports can be made."""

    @property
    def base(self) -> Path:
        """The folder of the trained model."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A pipeline folder, and which parts of it were trained."""

    base: Path
    parts: tuple[str, ...]  # of the denoiser, as in model_index.json
    # entries of call.json that the base's call.json does not have
    call: Mapping[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()  # patterns of tensors that full training leaves unchanged (models/base.py)

    @classmethod
    def of(cls, model: DiffusionModel) -> ExportTarget:
        """Create the target of a loaded model.

        Includes the prompt encoding and embedded guidance if they differ from the base folder or the pipeline's
        defaults.
        """
        base = model.path.absolute()
        base_call = read_json(base / CALL) if (base / CALL).exists() else {}
        trained_arguments = model.trained_call().items()
        call_arguments = {
            n: value for n, value in trained_arguments if base_call.get(n, stock_argument(model.pipeline, n)) != value
        }
        return cls(base, tuple(model.denoiser_parts), call_arguments, tuple(model.frozen))

    @classmethod
    def of_json(cls, note: Mapping[str, Any]) -> ExportTarget:
        """Read the result of `to_json`. Raises ModelError for a checkpoint of a language model, which has no
        pipeline."""
        if "parts" not in note:
            raise ModelError(
                f"a checkpoint of the language model {note['base']} cannot be converted: resume its run, which "
                "exports at its end"
            )
        return cls(Path(note["base"]), tuple(note["parts"]), note["call"], tuple(note.get("frozen", ())))

    def to_json(self) -> dict[str, Any]:
        note = {"base": str(self.base), "parts": list(self.parts), "call": dict(self.call)}
        return note | ({"frozen": list(self.frozen)} if self.frozen else {})

    def is_frozen(self, name: str) -> bool:
        """Return whether training left a tensor of a part, given by its name in the part, unchanged."""
        return matches(name, self.frozen)

    def config(self, part: str) -> dict[str, Any]:
        """Return the config of a part. Raises ModelError if it cannot be read."""
        config = read_json(self.base / part / "config.json")
        config.pop("_name_or_path", None)  # a path on another machine
        return config

    def bare(self, part: str) -> nn.Module:
        """Build a part from its config on the meta device. Raises ModelError if the base does not have it."""
        _, class_name = components(read_index(self.base)).get(part, (None, None))
        network_class = getattr(diffusers, str(class_name), None)
        if network_class is None:
            raise ModelError(f"{self.base} has no {part} with a diffusers class; name the pipeline that was trained")
        with torch.device("meta"):
            network: nn.Module = network_class.from_config(self.config(part))
        return network

    def specs(self, part: str) -> dict[str, Spec]:
        """Return names, dtypes (from the config: float32 for weights) and shapes of a part's state dict."""
        return {name: Spec(tensor.dtype, tensor.shape) for name, tensor in self.bare(part).state_dict().items()}

    def shapes(self, part: str) -> dict[str, torch.Size]:
        """Return names and shapes of a part's state dict."""
        return {name: spec.shape for name, spec in self.specs(part).items()}

    def prefix(self, part: str) -> str:
        """Return the prefix of a part's tensor names in an engine: empty if there is only one part."""
        return "" if len(self.parts) == 1 else f"{part}."

    def stored(self, part: str) -> StoredWeights:
        """Return the weights of a part in the base folder."""
        return StoredWeights(self.base / part)


class StoredWeights:
    """The safetensors files of a network, read tensor by tensor.

    The file is opened and closed for each tensor, because it is memory-mapped and the pages read would count as memory
    while it is open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = index_file(folder, WEIGHTS)
        variant = variant_to_load(folder)
        self._only = f"{WEIGHTS}.{variant}.safetensors" if variant else f"{WEIGHTS}.safetensors"
        self._file_of: dict[str, str] | None = read_json(index)["weight_map"] if index.is_file() else None

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises ModelError if the file or the tensor is missing or cannot be read."""
        file = self._only if self._file_of is None else self._file_of.get(name, name)
        try:
            with safe_open(self.folder / file, "pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read from {self.folder} ({error}); copy the pipeline again") from error
        return tensor


def call_json(base: Path, news: Mapping[str, Any]) -> str:
    """Return the text of a call.json that adds these arguments to the base's."""
    base_call = read_json(base / CALL) if (base / CALL).exists() else {}
    return json.dumps(base_call | dict(news))
