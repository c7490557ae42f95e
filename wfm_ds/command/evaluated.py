"""Models as `wfm evaluate` is given them: a pipeline, a LoRA on one, an export, or a run; and the recipe behind it."""

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
    """One model to be evaluated."""

    given: str
    name: str  # for tables and folders
    model: str  # a pipeline; of a LoRA, the one that it is for
    lora: Path | None = None
    recipe: Recipe | None = None  # of the run that exported it
    revision: str | None = None  # of `model`


def entries_of(given: Sequence[str], out: Path, revision: str | None, held: contextlib.ExitStack) -> list[Entry]:
    """Find what was given, the base first; a LoRA that comes first brings its run's base along. What lies in a storage
    is there as long as `held`. Raises UserError."""
    found: list[Entry] = []
    for place in given:
        recipe = recipe_of(place)
        folder = place if is_remote(place) else str(exported(Path(place), recipe is not None))
        here = held.enter_context(on_this_machine(folder, out.parent))
        lora = adapter_in(here)
        if lora is None:
            path = folder if not here.exists() else str(here)
            if here.is_dir() and not (here / INDEX).exists():
                raise UserError(f"{place} is no pipeline ({INDEX}), no export of a run and no run")
            if len(given) == 1 and recipe is not None and recipe.model.denoiser_init == "pretrained":
                found.append(base_of(place, recipe))
            found.append(
                Entry(given=place, name=short(place), model=path, recipe=recipe, revision=None if found else revision)
            )
            continue
        adapter_names(adapter_file(lora))  # before anything is drawn
        if not found:
            found.append(base_of(place, recipe))
        base = found[0]
        if base.lora is not None:
            raise UserError(f"{place} is a LoRA, and so is {base.given}: name the model that they are for first")
        found.append(replace(base, given=place, name=short(place), lora=lora, recipe=recipe))
    return named_apart(found)


def recipe_of(place: str) -> Recipe | None:
    """The recipe of the run that an export, or a run's folder, belongs to; None if there is none beside it."""
    full = place.rstrip("/") if is_remote(place) else str(Path(place).absolute())
    root, inside, _ = full.partition(f"/{EXPORTS}/")
    return read_recipe(root)[1] if inside or (Path(root) / RECIPE).is_file() else None


def exported(folder: Path, is_known: bool) -> Path:
    """The newest export of a run's folder; another folder as it is. Raises UserError if the run has none."""
    if not is_known or not (folder / RECIPE).is_file():
        return folder
    steps = [(int(m[1]), one) for one in (folder / EXPORTS).glob("step_*") if (m := STEP_FOLDER.fullmatch(one.name))]
    if not steps:
        raise UserError(
            f"{folder} is a run without an export in {EXPORTS}/: let it finish, or set checkpoint.export_every"
        )
    return max(steps)[1]


def adapter_in(folder: Path) -> Path | None:
    """The LoRA folder that this is or holds; None if there is none."""
    name = LORA_FILES[LORA_PREFIX]
    if (folder / INDEX).exists():
        return None
    return next((one for one in (folder, folder / LORA_FOLDER) if (one / name).is_file()), None)


def base_of(place: str, recipe: Recipe | None) -> Entry:
    """The model that a run trained its LoRA on."""
    if recipe is None:
        raise UserError(f"{place} is a LoRA: name the model that it was trained on before it")
    path = str(recipe.model.path)
    return Entry(given=path, name=short(path), model=path, revision=recipe.model.revision)


def short(place: str) -> str:
    """The word for a model in tables: the last of its path that tells something."""
    words = [word for word in place.rstrip("/").split("/") if word not in (LORA_FOLDER, "")]
    return re.sub(r"[^\w.-]", "_", words[-1] if words else "model")


def named_apart(found: Sequence[Entry]) -> list[Entry]:
    """Entries of one name get their run's name before it, or a number behind."""
    names = [one.name for one in found]
    runs = [one.given.partition(f"/{EXPORTS}/") for one in found]
    longer = [
        f"{short(run)}_{name}" if inside and names.count(name) > 1 else name
        for (run, inside, _), name in zip(runs, names, strict=True)
    ]
    return [
        replace(one, name=name if longer.count(name) == 1 else f"{name}_{place}")
        for place, (one, name) in enumerate(zip(found, longer, strict=True), 1)
    ]
