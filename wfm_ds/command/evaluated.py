"""Resolve the model arguments of `wfm evaluate`: pipelines, LoRAs, exports and runs, with the recipe of the run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wfm_ds.checkpoint.adapter import adapter_file, adapter_names
from wfm_ds.checkpoint.export import LORA_FILES, LORA_FOLDER, LORA_PREFIX
from wfm_ds.checkpoint.pipeline_folder import INDEX
from wfm_ds.checkpoint.remote import on_this_machine
from wfm_ds.checkpoint.store import STEP_FOLDER
from wfm_ds.errors import UserError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.layout import EXPORTS, RECIPE, read_recipe
from wfm_ds.storage.filesystem import is_remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model to evaluate."""

    given: str  # as on the command line
    name: str  # in tables and folder names
    model: str  # the pipeline; for a LoRA, its base
    lora: Path | None = None
    recipe: Recipe | None = None  # of its run
    revision: str | None = None  # of `model`


def entries_of(given: Sequence[str], out: Path, revision: str | None, held: contextlib.ExitStack) -> list[Entry]:
    """Resolve the models, base first. If the first one is a LoRA, the base model of its run is inserted before it.

    Remote exports are copied to this machine until `stack` closes. Raises UserError.
    """
    models: list[Entry] = []
    for argument in given:
        recipe = recipe_of(argument)
        folder = argument if is_remote(argument) else str(exported(Path(argument), recipe is not None))
        local = held.enter_context(on_this_machine(folder, out.parent))
        lora = adapter_in(local)
        if lora is None:
            path = folder if not local.exists() else str(local)
            if local.is_dir() and not (local / INDEX).exists():
                raise UserError(f"{argument} is not a pipeline (no {INDEX}), an export or a run")
            if len(given) == 1 and recipe is not None and recipe.model.denoiser_init == "pretrained":
                models.append(base_of(argument, recipe))
            name, model_revision = short(argument), None if models else revision
            models.append(Entry(given=argument, name=name, model=path, recipe=recipe, revision=model_revision))
            continue
        adapter_names(adapter_file(lora))  # fails early if the file is damaged
        if not models:
            models.append(base_of(argument, recipe))
        base = models[0]
        if base.lora is not None:
            raise UserError(f"{argument} and {base.given} are LoRAs: put their base model first")
        models.append(replace(base, given=argument, name=short(argument), lora=lora, recipe=recipe))
    return named_apart(models)


def recipe_of(place: str) -> Recipe | None:
    """Return the recipe of the run that an export or folder belongs to; None if there is none."""
    full = place.rstrip("/") if is_remote(place) else str(Path(place).absolute())
    root, separator, _ = full.partition(f"/{EXPORTS}/")
    return read_recipe(root)[1] if separator or (Path(root) / RECIPE).is_file() else None


def exported(folder: Path, is_known: bool) -> Path:
    """Return the newest export of a run folder; other folders unchanged. Raises UserError if the run has no export."""
    if not is_known or not (folder / RECIPE).is_file():
        return folder
    exports = (folder / EXPORTS).glob("step_*")
    steps = [(int(m[1]), export) for export in exports if (m := STEP_FOLDER.fullmatch(export.name))]
    if not steps:
        raise UserError(f"{folder} has no export in {EXPORTS}/: let the run finish, or set checkpoint.export_every")
    return max(steps)[1]


def adapter_in(folder: Path) -> Path | None:
    """Return the LoRA folder: the folder itself or its lora/; None if there is none."""
    name = LORA_FILES[LORA_PREFIX]
    if (folder / INDEX).exists():
        return None
    return next((path for path in (folder, folder / LORA_FOLDER) if (path / name).is_file()), None)


def base_of(place: str, recipe: Recipe | None) -> Entry:
    """Return the base model of a run. Raises UserError if there is no recipe."""
    if recipe is None:
        raise UserError(f"{place} is a LoRA without a run: put its base model first")
    path = str(recipe.model.path)
    return Entry(given=path, name=short(path), model=path, revision=recipe.model.revision)


def short(place: str) -> str:
    """Return a short name for tables: the last meaningful component of the path."""
    parts = [part for part in place.rstrip("/").split("/") if part not in (LORA_FOLDER, "")]
    return re.sub(r"[^\w.-]", "_", parts[-1] if parts else "model")


def named_apart(found: Sequence[Entry]) -> list[Entry]:
    """Make names unique: prefix duplicates with the name of their run, or append a number."""
    names = [model.name for model in found]
    runs = [model.given.partition(f"/{EXPORTS}/") for model in found]
    long_names = [
        f"{short(run)}_{name}" if separator and names.count(name) > 1 else name
        for (run, separator, _), name in zip(runs, names, strict=True)
    ]
    return [
        replace(model, name=name if long_names.count(name) == 1 else f"{name}_{number}")
        for number, (model, name) in enumerate(zip(found, long_names, strict=True), 1)
    ]
