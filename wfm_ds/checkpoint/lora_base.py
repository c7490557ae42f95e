"""The pipeline that a LoRA is for: the names of its layers, and its weights where a layout depends on them."""

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
    """A LoRA of any layout, and the names of its family: that of `base`, a pipeline folder, or the only family whose
    layers it can name. None: several can, and its names are diffusers' own. Raises ModelError."""
    if base is not None:
        names = names_of(registry.family_of(base))
        return LoraSource(path, names.table, weights_of(base)), names
    fitting = {name: found for name, family in registry.families().items() if (found := _read_as(path, family))}
    layouts = {names.table.names: (source, names) for source, names in fitting.values()}
    if len(layouts) == 1:
        return next(iter(layouts.values()))
    return LoraSource(path), None


def _read_as(path: Path, family: type[DiffusionModel]) -> tuple[LoraSource, Names] | None:
    """The LoRA as one of this family; None if its table does not name every layer."""
    names = names_of(family)
    try:
        source = LoraSource(path, names.table)
    except ModelError:
        return None
    known = all(names.table.original(module) for layers in source.layers.values() for module in layers)
    return (source, names) if known else None


def denoiser_parts(base: Path) -> tuple[str, ...]:
    """The parts of the denoiser that a pipeline folder has. Raises ModelError for one of no known family."""
    there = components(read_index(base))
    return tuple(part for part in registry.family_of(base).denoiser_parts if there.get(part, (None, None))[1])


def weights_of(base: Path) -> Callable[[str], Weight]:
    """The weights of a pipeline's parts, by part and layer, read one by one."""
    return lambda part: functools.partial(_weight, ExportTarget(base, ()).stored(part))


def _weight(stored: StoredWeights, module: str) -> Tensor:
    return stored.tensor(f"{module}.weight")
