"""The pipeline that a LoRA belongs to: names of its layers, and its weights for layouts that depend on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from wfm_ds.checkpoint.lora_file import LoraSource, Weight
from wfm_ds.checkpoint.pipeline_folder import components, read_index
from wfm_ds.checkpoint.target import ExportTarget, StoredWeights
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.lora_names import Names, NameTable


def names_of(family: type[DiffusionModel]) -> Names:
    return Names(family.family, NameTable(family.lora_names), family.comfyui_prefix)


def read_lora(path: Path, base: Path | None) -> tuple[LoraSource, Names | None]:
    """Read a LoRA of any layout. Returns it with the layer names of its family.

    The family of the pipeline folder `base` or, without a base, the only family with all of its layers is used. The
    names
    are None if several families fit and the LoRA uses diffusers' names. Raises ModelError.
    """
    if base is not None:
        names = names_of(registry.family_of(base))
        return LoraSource(path, names.table, weights_of(base)), names
    sources = {name: found for name, family in registry.families().items() if (found := _read_as(path, family))}
    layouts = {names.table.names: (source, names) for source, names in sources.values()}
    if len(layouts) == 1:
        return next(iter(layouts.values()))
    return LoraSource(path), None


def _read_as(path: Path, family: type[DiffusionModel]) -> tuple[LoraSource, Names] | None:
    """Read the LoRA as one of this family; None if the family's table does not have every layer."""
    names = names_of(family)
    try:
        source = LoraSource(path, names.table)
    except ModelError:
        return None
    names_all_layers = all(names.table.original(module) for layers in source.layers.values() for module in layers)
    return (source, names) if names_all_layers else None


def denoiser_parts(base: Path) -> tuple[str, ...]:
    """Return the parts of the denoiser in a pipeline folder. Raises ModelError if its family is unknown."""
    classes = components(read_index(base))
    return tuple(part for part in registry.family_of(base).denoiser_parts if classes.get(part, (None, None))[1])


def weights_of(base: Path) -> Callable[[str], Weight]:
    """Return a function that gives, for each part of a pipeline, a reader of single layer weights."""
    return lambda part: functools.partial(_weight, ExportTarget(base, ()).stored(part))


def _weight(stored: StoredWeights, module: str) -> Tensor:
    return stored.tensor(f"{module}.weight")
