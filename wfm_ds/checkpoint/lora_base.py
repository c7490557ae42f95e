"""The pipeline that a LoRA belongs to: names of its layers, and its weights for layouts that depend on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from wfm_ds.checkpoint.export_target import ExportTarget, FolderWeights
from wfm_ds.checkpoint.lora_file import LoraSource, WeightReader
from wfm_ds.checkpoint.pipeline_folder import pipeline_components, read_index
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import FamilyLoraNames, LoraNameTable


def family_names(family: type[DiffusionModel]) -> FamilyLoraNames:
    return FamilyLoraNames(family.family, LoraNameTable(family.lora_layer_names), family.comfyui_prefix)


def read_lora(path: Path, base: Path | None) -> tuple[LoraSource, FamilyLoraNames | None]:
    """Read a LoRA of any layout. Returns it with the layer names of its family.

    The family of the pipeline folder `base` or, without a base, the only family with all of its layers is used. The
    names
    are None if several families fit and the LoRA uses diffusers' names. Raises ModelError.
    """
    if base is not None:
        names = family_names(registry.find_family(base))
        return LoraSource(path, names.table, base_weight_readers(base)), names
    sources = {
        name: found for name, family in registry.model_families().items() if (found := _read_for_family(path, family))
    }
    layouts = {names.table.names: (source, names) for source, names in sources.values()}
    if len(layouts) == 1:
        return next(iter(layouts.values()))
    return LoraSource(path), None


def _read_for_family(path: Path, family: type[DiffusionModel]) -> tuple[LoraSource, FamilyLoraNames] | None:
    """Read the LoRA as one of this family; None if the family's table does not have every layer."""
    names = family_names(family)
    try:
        source = LoraSource(path, names.table)
    except ModelError:
        return None
    names_all_layers = all(names.table.find_original(module) for layers in source.layers.values() for module in layers)
    return (source, names) if names_all_layers else None


def denoiser_parts(base: Path) -> tuple[str, ...]:
    """Return the parts of the denoiser in a pipeline folder. Raises ModelError if its family is unknown."""
    classes = pipeline_components(read_index(base))
    return tuple(part for part in registry.find_family(base).denoiser_components if classes.get(part, (None, None))[1])


def base_weight_readers(base: Path) -> Callable[[str], WeightReader]:
    """Return a function that gives, for each part of a pipeline, a reader of single layer weights."""
    return lambda part: functools.partial(_read_weight, ExportTarget(base, ()).base_weights(part))


def _read_weight(stored: FolderWeights, module: str) -> Tensor:
    return stored.read_tensor(f"{module}.weight")
