"""Commit of a Hub model: resolved once, stored in the run's recipe, downloaded by one process per machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.models import hub, language_location, registry
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run import layout

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)


def at_commit(recipe: Recipe, *, overwrite: bool = False) -> Recipe:
    """Return the recipe with a commit in model.revision: that of the continued run, else the branch's or tag's current
    one. Recipes with local models are returned unchanged.

    overwrite: ignore an existing run. Raises ModelError if the Hub cannot resolve the revision, and the errors of
    reading the run's recipe.
    """
    path, revision = recipe.model.path, recipe.model.revision
    if not hub.is_id(path) or hub.is_commit(revision):
        return recipe
    commit = None if overwrite else began_with(recipe)
    if commit is None:
        commit = located(recipe).name
    elif revision is not None:
        log.info("model.revision %s: this run keeps its initial commit %s", revision, commit)
    return with_revision(recipe, commit)


def with_revision(recipe: Recipe, revision: str | None) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": revision})})


def began_with(recipe: Recipe) -> str | None:
    """Return the commit stored by the run that this recipe continues, or None."""
    for place in continued(recipe):
        _, other = layout.read_recipe(place)
        if other is not None and other.model.path == recipe.model.path and hub.is_commit(other.model.revision):
            return other.model.revision
    return None


def continued(recipe: Recipe) -> Iterator[str]:
    """Yield the folders and addresses that may contain the recipe: first of this run, then of the run it starts
    from."""
    yield str(recipe.run.output_dir)
    if recipe.checkpoint.storage is not None:
        yield recipe.checkpoint.storage
    if recipe.run.resume not in ("auto", "never"):
        yield str(Path(recipe.run.resume).expanduser()) if "://" not in recipe.run.resume else recipe.run.resume


def agreed_commit(recipe: Recipe, world: World, *, overwrite: bool) -> Recipe:
    """Run pin_commit on rank 0 and return its result on all ranks. Collective."""
    revision = world.checked(lambda: at_commit(recipe, overwrite=overwrite).model.revision, on="main")
    return with_revision(recipe, world.broadcast(revision))


def fetch(recipe: Recipe, world: World) -> None:
    """Download a Hub model to the cache of each machine, with one process per machine. Collective.

    The other ranks wait without a timeout. A ModelError on any rank is raised on all ranks.
    """
    model = recipe.model
    if not world.broadcast(hub.is_id(model.path)):  # rank 0 decides: a local folder may exist only on its machine
        return
    log.info("model %s @ %s", model.path, str(model.revision)[:7])
    world.patiently(lambda: str(complete(recipe)), here=world.local_rank == 0)


def located(recipe: Recipe) -> Path:
    """Return the folder of a model, downloading only what is needed to find its commit. Raises ModelError."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_location.locate(model.path, model.revision)
    return registry.locate(model.path, model.family, model.revision)


def complete(recipe: Recipe) -> Path:
    """Return the folder of a model with all its files. Raises ModelError."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_location.resolve(model.path, model.revision)
    return registry.resolve(model.path, model.family, model.revision)
