"""The target of an export: the pipeline that was trained, known from its folder alone, without a loaded model."""

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

WEIGHTS = "diffusion_pytorch_model"  # the stem that diffusers looks for


class ExportNote(Protocol):
    """The note of a checkpoint about the exports that can be made of it."""

    @property
    def base(self) -> Path:
        """The folder of the model that was trained."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A pipeline folder, and what of it training changed."""

    base: Path
    parts: tuple[str, ...]  # of the denoiser, as model_index.json names them
    call: Mapping[str, Any] = field(default_factory=dict)  # what call.json must say besides what the base's says
    frozen: tuple[str, ...] = ()  # patterns of tensors that full training left as the base has them (models/base.py)

    @classmethod
    def of(cls, model: DiffusionModel) -> ExportTarget:
        """Make the target of a loaded model; note how it encoded prompts, and its embedded guidance, where base folder
        or stock call say otherwise."""
        base = model.path.absolute()
        known = read_json(base / CALL) if (base / CALL).exists() else {}
        trained = model.trained_call().items()
        call = {n: value for n, value in trained if known.get(n, stock_argument(model.pipeline, n)) != value}
        return cls(base, tuple(model.denoiser_parts), call, tuple(model.frozen))

    @classmethod
    def of_json(cls, note: Mapping[str, Any]) -> ExportTarget:
        """Read what `to_json` gave. Raises ModelError for the checkpoint of a language model, which has no pipeline."""
        if "parts" not in note:
            raise ModelError(
                f"a checkpoint of the language model {note['base']} is not converted here: continue its run, which "
                "exports at its end"
            )
        return cls(Path(note["base"]), tuple(note["parts"]), note["call"], tuple(note.get("frozen", ())))

    def to_json(self) -> dict[str, Any]:
        note = {"base": str(self.base), "parts": list(self.parts), "call": dict(self.call)}
        return note | ({"frozen": list(self.frozen)} if self.frozen else {})

    def is_frozen(self, name: str) -> bool:
        """Return whether a tensor of a part, by its own name, is the base's."""
        return matches(name, self.frozen)

    def config(self, part: str) -> dict[str, Any]:
        """The config of a part. Raises ModelError if it cannot be read."""
        config = read_json(self.base / part / "config.json")
        config.pop("_name_or_path", None)  # where some machine had it
        return config

    def bare(self, part: str) -> nn.Module:
        """A part as its config makes it, on the meta device. Raises ModelError if the base does not have it."""
        _, kind = components(read_index(self.base)).get(part, (None, None))
        network_class = getattr(diffusers, str(kind), None)
        if network_class is None:
            raise ModelError(f"{self.base} has no {part} that diffusers knows; name the pipeline that was trained")
        with torch.device("meta"):
            network: nn.Module = network_class.from_config(self.config(part))
        return network

    def specs(self, part: str) -> dict[str, Spec]:
        """The state dict of a part: names, dtypes as its config makes it (float32 for weights), shapes."""
        return {name: Spec(tensor.dtype, tensor.shape) for name, tensor in self.bare(part).state_dict().items()}

    def shapes(self, part: str) -> dict[str, torch.Size]:
        """Names and shapes of the state dict of a part."""
        return {name: spec.shape for name, spec in self.specs(part).items()}

    def prefix(self, part: str) -> str:
        """Return what stands before the names of a part's tensors in an engine: nothing, unless there are several
        parts."""
        return "" if len(self.parts) == 1 else f"{part}."

    def stored(self, part: str) -> StoredWeights:
        """The weights that a part has in the base folder."""
        return StoredWeights(self.base / part)


class StoredWeights:
    """The safetensors of a network in its folder, read tensor by tensor.

    Each time the file is opened and closed: it is mapped, and all that was read of it counts as memory until then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = index_file(folder, WEIGHTS)
        variant = variant_to_load(folder)
        self._only = f"{WEIGHTS}.{variant}.safetensors" if variant else f"{WEIGHTS}.safetensors"
        self._file_of: dict[str, str] | None = read_json(index)["weight_map"] if index.is_file() else None

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError if the file or the tensor is not there, or cannot be read."""
        file = self._only if self._file_of is None else self._file_of.get(name, name)
        try:
            with safe_open(self.folder / file, "pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read from {self.folder} ({error}); copy the pipeline again") from error
        return tensor


def call_json(base: Path, news: Mapping[str, Any]) -> str:
    """The text of call.json that adds these arguments to the base's."""
    known = read_json(base / CALL) if (base / CALL).exists() else {}
    return json.dumps(known | dict(news))
