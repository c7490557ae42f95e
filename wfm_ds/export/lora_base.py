"""Reads a LoRA, using the layer names and weights of its base pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_file import LoraSource, WeightReader
from wfm_ds.export.pipeline_folder import pipeline_components, read_index
from wfm_ds.export.target import FolderWeights
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_layer_names import LoraNameTable


def read_lora(path: Path, base: Path | None) -> tuple[LoraSource, type[DiffusionModel] | None]:
    """Read a LoRA in any layout. Return (LoRA, its model family).

    base: pipeline folder that determines the family. None: the layer names of the LoRA determine the family. If these
    names match no family or several families, the LoRA must use diffusers' names, and the returned family is None.
    Raises ModelError if the LoRA cannot be read or its layer names are unknown.
    """
    if base is not None:
        family = registry.find_family(base)
        return LoraSource(path, LoraNameTable(family.lora_layer_names), base_weight_readers(base)), family
    families = {family.lora_layer_names: family for family in registry.model_families().values()}
    matches = [(source, family) for family in families.values() if (source := _read_for_family(path, family))]
    return matches[0] if len(matches) == 1 else (LoraSource(path), None)


def _read_for_family(path: Path, family: type[DiffusionModel]) -> LoraSource | None:
    table = LoraNameTable(family.lora_layer_names)
    try:
        source = LoraSource(path, table)
    except ModelError:
        return None
    names_all_layers = all(table.find_original(module) for layers in source.layers.values() for module in layers)
    return source if names_all_layers else None


def denoiser_parts(base: Path) -> tuple[str, ...]:
    """Return the names of a pipeline's denoiser components. Raises ModelError if the pipeline's family is unknown."""
    classes = pipeline_components(read_index(base))
    return tuple(part for part in registry.find_family(base).denoiser_components if classes.get(part, (None, None))[1])


def base_weight_readers(base: Path) -> Callable[[str], WeightReader]:
    """Return a function that maps a denoiser component to its `WeightReader`."""
    return lambda part: FolderWeights(base / part).read_weight
