"""Resolve the models of `wfm evaluate` (pipelines, LoRAs, exports, runs) and find the recipes that trained them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wfm_ds.checkpoint.adapter_loading import find_adapter_file, read_adapter_names
from wfm_ds.checkpoint.remote_store import open_locally
from wfm_ds.checkpoint.store import STEP_FOLDER
from wfm_ds.errors import UserError
from wfm_ds.export.pipeline_folder import INDEX_FILE
from wfm_ds.export.weights import LORA_FILES, LORA_FOLDER, LORA_PREFIX
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.layout import EXPORTS, RECIPE_FILE, read_run_recipe
from wfm_ds.storage.filesystem import is_remote


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """A model to evaluate: a pipeline, optionally with a LoRA."""

    argument: str  # as on the command line
    name: str  # unique, for tables and folders
    model: str  # the pipeline; for a LoRA, its base
    lora: Path | None = None
    recipe: Recipe | None = None  # of the run that trained it
    revision: str | None = None  # Hub revision of `model`


def resolve_models(
    arguments: Sequence[str], out: Path, revision: str | None, stack: contextlib.ExitStack
) -> list[EvaluatedModel]:
    """Return the models to evaluate, the base model first.

    If the first argument is a LoRA, or if the only argument is a run or its export, its base model is added. Remote
    exports are downloaded, and removed when `stack` closes. Raises UserError if an argument cannot be evaluated.
    """
    models: list[EvaluatedModel] = []
    for argument in arguments:
        recipe = find_run_recipe(argument)
        folder = argument if is_remote(argument) else str(find_newest_export(Path(argument), recipe is not None))
        local = stack.enter_context(open_locally(folder, out.parent))
        lora = find_adapter(local)
        if lora is None:
            path = folder if not local.exists() else str(local)
            if local.is_dir() and not (local / INDEX_FILE).exists():
                raise UserError(f"{argument} is not a pipeline (no {INDEX_FILE}), an export or a run")
            if len(arguments) == 1 and recipe is not None and recipe.model.denoiser_init == "pretrained":
                models.append(base_model(argument, recipe))
            name, model_revision = short_name(argument), None if models else revision
            models.append(
                EvaluatedModel(argument=argument, name=name, model=path, recipe=recipe, revision=model_revision)
            )
            continue
        read_adapter_names(find_adapter_file(lora))  # fails early if the file is damaged
        if not models:
            models.append(base_model(argument, recipe))
        base = models[0]
        if base.lora is not None:
            raise UserError(f"{argument} and {base.argument} are LoRAs: put their base model first")
        models.append(replace(base, argument=argument, name=short_name(argument), lora=lora, recipe=recipe))
    return make_names_unique(models)


def find_run_recipe(argument: str) -> Recipe | None:
    """Return the recipe of a run, from the run's folder or an export. Returns None if `argument` is neither."""
    full = argument.rstrip("/") if is_remote(argument) else str(Path(argument).absolute())
    root, separator, _ = full.partition(f"/{EXPORTS}/")
    return read_run_recipe(root)[1] if separator or (Path(root) / RECIPE_FILE).is_file() else None


def find_newest_export(folder: Path, is_run: bool) -> Path:
    if not is_run or not (folder / RECIPE_FILE).is_file():
        return folder
    exports = (folder / EXPORTS).glob("step_*")
    steps = [(int(m[1]), export) for export in exports if (m := STEP_FOLDER.fullmatch(export.name))]
    if not steps:
        raise UserError(f"{folder} has no export in {EXPORTS}/: let the run finish, or set checkpoint.export_every")
    return max(steps)[1]


def find_adapter(folder: Path) -> Path | None:
    name = LORA_FILES[LORA_PREFIX]
    if (folder / INDEX_FILE).exists():
        return None
    return next((path for path in (folder, folder / LORA_FOLDER) if (path / name).is_file()), None)


def base_model(argument: str, recipe: Recipe | None) -> EvaluatedModel:
    if recipe is None:
        raise UserError(f"{argument} is a LoRA without a run: put its base model first")
    path = str(recipe.model.path)
    return EvaluatedModel(argument=path, name=short_name(path), model=path, revision=recipe.model.revision)


def short_name(path: str) -> str:
    parts = [part for part in path.rstrip("/").split("/") if part not in (LORA_FOLDER, "")]
    return re.sub(r"[^\w.-]", "_", parts[-1] if parts else "model")


def make_names_unique(models: Sequence[EvaluatedModel]) -> list[EvaluatedModel]:
    names = [model.name for model in models]
    runs = [model.argument.partition(f"/{EXPORTS}/") for model in models]
    long_names = [
        f"{short_name(run)}_{name}" if separator and names.count(name) > 1 else name
        for (run, separator, _), name in zip(runs, names, strict=True)
    ]
    return [
        replace(model, name=name if long_names.count(name) == 1 else f"{name}_{number}")
        for number, (model, name) in enumerate(zip(models, long_names, strict=True), 1)
    ]
