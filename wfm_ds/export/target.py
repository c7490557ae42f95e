"""The trained pipeline as the target of an export. The pipeline's folder is read without loading the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wfm_ds.errors import ModelError
from wfm_ds.export.few_step_call import build_few_step_call
from wfm_ds.export.pipeline_folder import REPLACEABLE_CONFIGS, pipeline_components, read_index
from wfm_ds.export.tensor_file import StoredTensorSpec
from wfm_ds.models.assets.loading import read_call_json, read_json, read_weight_map
from wfm_ds.models.assets.weight_files import select_variant, shard_index_path
from wfm_ds.models.base import matches_any_pattern, pipeline_call_default

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.recipe.sampling import SamplingRecipe

WEIGHTS_STEM = "diffusion_pytorch_model"  # the file stem that diffusers expects


class ExportInfo(Protocol):
    """Settings of an export, which are stored in each checkpoint."""

    @property
    def base(self) -> Path:
        """Folder of the model that was trained."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The base pipeline folder of an export, and the names of the trained components."""

    base: Path
    parts: tuple[str, ...]  # denoiser components, as in model_index.json
    # entries of the export's call.json that differ from the base folder's call.json
    call_arguments: Mapping[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()  # patterns of tensors that full training leaves unchanged (models/base.py)
    scheduler: Mapping[str, Any] | None = None  # config of the scheduler that replaces the base pipeline's scheduler
    guider: Mapping[str, Any] | None = None  # config of the guider that replaces the base pipeline's guider

    @classmethod
    def from_model(cls, model: DiffusionModel, sampling: SamplingRecipe | None = None) -> ExportTarget:
        """Create the target for a loaded model.

        The target stores call arguments that differ from the base folder's call.json or from the pipeline's defaults.
        With `sampling.eval_grid: even`, raises ModelError if plain diffusers cannot use these noise levels or the
        guidance.
        """
        base = model.path.absolute()
        base_call = read_call_json(base)
        trained_arguments = model.export_call_kwargs().items()
        call_arguments = {
            n: value
            for n, value in trained_arguments
            if base_call.get(n, pipeline_call_default(model.pipeline, n)) != value
        }
        scheduler = guider = None
        if sampling is not None and sampling.eval_grid == "even":
            arguments, scheduler, guider = build_few_step_call(model, sampling)
            call_arguments |= arguments
        parts, frozen = tuple(model.denoiser_components), tuple(model.unused_parameter_patterns)
        return cls(base, parts, call_arguments, frozen, scheduler, guider)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExportTarget:
        """Create a target from the result of `to_json`. Raises ModelError for a language model's checkpoint."""
        if "parts" not in values:
            raise ModelError(
                f"a checkpoint of the language model {values['base']} cannot be converted: resume its run, which "
                "exports at its end"
            )
        parts, frozen = tuple(values["parts"]), tuple(values.get("frozen", ()))
        configs = {name: values.get(name) for name in REPLACEABLE_CONFIGS}
        return cls(Path(values["base"]), parts, values["call"], frozen, **configs)

    def to_json(self) -> dict[str, Any]:
        note = {"base": str(self.base), "parts": list(self.parts), "call": dict(self.call_arguments)}
        note |= {"frozen": list(self.frozen)} if self.frozen else {}
        return note | {name: dict(config) for name, config in self.replaced_configs.items()}

    @property
    def replaced_configs(self) -> dict[str, Mapping[str, Any]]:
        """Return {component: its config in the export} for the components in REPLACEABLE_CONFIGS that differ."""
        configs = {name: getattr(self, name) for name in REPLACEABLE_CONFIGS}
        return {name: config for name, config in configs.items() if config is not None}

    def is_frozen(self, name: str) -> bool:
        """Return whether training left a tensor unchanged. name: the tensor's name within its component."""
        return matches_any_pattern(name, self.frozen)

    def read_config(self, part: str) -> dict[str, Any]:
        """Return the config.json of a component. Raises ModelError if it cannot be read."""
        config = read_json(self.base / part / "config.json")
        config.pop("_name_or_path", None)  # a path on another machine
        return config

    def meta_network(self, part: str) -> nn.Module:
        """Build a component's network on the meta device.

        Raises ModelError if the base folder does not have the component, or if its class cannot be imported.
        """
        library, class_name = pipeline_components(read_index(self.base)).get(part, (None, None))
        if library is None or class_name is None:
            raise ModelError(f"{self.base} has no {part}; name the pipeline that was trained")
        try:
            network_class = getattr(importlib.import_module(library), class_name)
        except (ImportError, AttributeError) as error:
            raise ModelError(f"{self.base}: {part} has the class {library}.{class_name}: {error}") from error
        with torch.device("meta"):
            network: nn.Module = network_class.from_config(self.read_config(part))
        return network

    def tensor_specs(self, part: str) -> dict[str, StoredTensorSpec]:
        """Return {name: dtype and shape} of a component's tensors, according to its config. Weights are float32."""
        return {
            name: StoredTensorSpec(tensor.dtype, tensor.shape)
            for name, tensor in self.meta_network(part).state_dict().items()
        }

    def tensor_shapes(self, part: str) -> dict[str, torch.Size]:
        return {name: spec.shape for name, spec in self.tensor_specs(part).items()}

    def tensor_prefix(self, part: str) -> str:
        """Return the prefix of a component's tensor names in the engine, or "" if there is only one component."""
        return "" if len(self.parts) == 1 else f"{part}."

    def base_weights(self, part: str) -> FolderWeights:
        return FolderWeights(self.base / part)


class FolderWeights:
    """Reads single tensors from the safetensors files of a network."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = shard_index_path(folder, WEIGHTS_STEM)
        variant = select_variant(folder)
        self._single_file = f"{WEIGHTS_STEM}.{variant}.safetensors" if variant else f"{WEIGHTS_STEM}.safetensors"
        self._file_of = read_weight_map(index) if index.is_file() else None

    def read_weight(self, module: str) -> Tensor:
        return self.read_tensor(f"{module}.weight")

    def read_tensor(self, name: str) -> Tensor:
        """Return the tensor with this name. Raises ModelError if the tensor cannot be read."""
        file = self._single_file if self._file_of is None else self._file_of.get(name, name)
        try:
            # Open the file for each read: mapped pages of an open file count as memory of this process.
            with safe_open(self.folder / file, "pt") as handle:
                tensor: Tensor = handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{name} cannot be read from {self.folder} ({error}); copy the pipeline again") from error
        return tensor
