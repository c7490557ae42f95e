"""Resolves a model on the Hub to a commit and downloads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.models import registry
from wfm_ds.models.assets import hub, language_folders
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs import layout
from wfm_ds.storage.filesystem import is_repo_id

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)


def pin_commit(recipe: Recipe, *, overwrite: bool = False) -> Recipe:
    """Return a copy of the recipe with a commit in model.revision. Recipes with a local model do not change.

    A recipe that continues a run gets the commit of that run, and any other recipe the current commit of its branch or
    tag. overwrite: ignore an existing run. Raises ModelError if the Hub cannot resolve the revision, and RecipeError or
    StorageError if the recipe of the existing run cannot be read.
    """
    path, revision = recipe.model.path, recipe.model.revision
    if not is_repo_id(path) or hub.is_commit(revision):
        return recipe
    commit = None if overwrite else find_previous_commit(recipe)
    if commit is None:
        commit = locate_model(recipe).name
    elif revision is not None:
        log.info("model.revision %s: this run keeps its initial commit %s", revision, commit)
    return set_revision(recipe, commit)


def set_revision(recipe: Recipe, revision: str | None) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": revision})})


def find_previous_commit(recipe: Recipe) -> str | None:
    """Return the model commit of the run that this recipe continues, or None if it continues no run."""
    for place in iterate_recipe_locations(recipe):
        _, other = layout.read_run_recipe(place)
        if other is not None and other.model.path == recipe.model.path and hub.is_commit(other.model.revision):
            return other.model.revision
    return None


def iterate_recipe_locations(recipe: Recipe) -> Iterator[str]:
    """Yield the addresses that may contain the recipe of an earlier run: output folder, its storage, and run.resume."""
    yield str(recipe.run.output_dir)
    if recipe.checkpoint.storage is not None:
        yield recipe.checkpoint.storage
    if recipe.run.resume not in ("auto", "never"):
        yield str(Path(recipe.run.resume).expanduser()) if "://" not in recipe.run.resume else recipe.run.resume


def agree_on_commit(recipe: Recipe, world: World, *, overwrite: bool) -> Recipe:
    """Call `pin_commit` on rank 0 and return the resulting recipe on all ranks. All ranks must call this."""
    revision = world.run_checked(lambda: pin_commit(recipe, overwrite=overwrite).model.revision, on="main")
    return set_revision(recipe, world.broadcast(revision))


def fetch_model(recipe: Recipe, world: World) -> None:
    """Download a model from the Hub to the cache of each machine. All ranks must call this.

    One process per machine downloads, and the others wait without a timeout. If a download fails, all ranks raise
    UserError.
    """
    model = recipe.model
    if not world.broadcast(is_repo_id(model.path)):  # rank 0 decides: a local folder may exist only on its machine
        return
    log.info("model %s @ %s", model.path, str(model.revision)[:7])
    world.run_without_timeout(lambda: str(resolve_model(recipe)), runs_here=world.local_rank == 0)


def locate_model(recipe: Recipe) -> Path:
    """Return a model's folder without downloading its weights. Raises ModelError if the model is not found."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_folders.locate_language_model(model.path, model.revision)
    return registry.locate_pipeline(model.path, model.family, model.revision)


def resolve_model(recipe: Recipe) -> Path:
    """Download the missing files of a Hub model, and return the model's local folder. Raises ModelError on failure."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_folders.download_language_model(model.path, model.revision)
    return registry.resolve_pipeline(model.path, model.family, model.revision)
