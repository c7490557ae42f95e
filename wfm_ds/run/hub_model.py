"""The commit of a model of the hub: found once, kept in the run's recipe, fetched by one process of each machine."""

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
    """Return the recipe with the commit of its model in model.revision: that of the run which it continues (one that
    `overwrite` clears is none), else that of the branch or tag at this moment. A model of this disk has none.

    Raises ModelError where the hub cannot say, and what reading the run's recipe raises.
    """
    path, revision = recipe.model.path, recipe.model.revision
    if not hub.is_id(path) or hub.is_commit(revision):
        return recipe
    commit = None if overwrite else began_with(recipe)
    if commit is None:
        commit = located(recipe).name
    elif revision is not None:
        log.info("model.revision %s: this run goes on with %s, the commit that it began with", revision, commit)
    return with_revision(recipe, commit)


def with_revision(recipe: Recipe, revision: str | None) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": revision})})


def began_with(recipe: Recipe) -> str | None:
    """Return the commit in the recipe of the run that this recipe continues; None if there is none with this model."""
    for place in continued(recipe):
        _, there = layout.read_recipe(place)
        if there is not None and there.model.path == recipe.model.path and hub.is_commit(there.model.revision):
            return there.model.revision
    return None


def continued(recipe: Recipe) -> Iterator[str]:
    """Yield the places where a run's recipe may be, the run's own before one whose checkpoint it begins with."""
    yield str(recipe.run.output_dir)
    if recipe.checkpoint.storage is not None:
        yield recipe.checkpoint.storage
    if recipe.run.resume not in ("auto", "never"):
        yield str(Path(recipe.run.resume).expanduser()) if "://" not in recipe.run.resume else recipe.run.resume


def agreed_commit(recipe: Recipe, world: World, *, overwrite: bool) -> Recipe:
    """Return `at_commit` as rank 0 finds it, on all ranks; collective."""
    found = world.checked(lambda: at_commit(recipe, overwrite=overwrite).model.revision, on="main")
    return with_revision(recipe, world.broadcast(found))


def fetch(recipe: Recipe, world: World) -> None:
    """Bring the model of the hub to the cache of each machine, where one process fetches while the others wait as long
    as it takes; collective. A ModelError anywhere is raised on all ranks."""
    model = recipe.model
    if not world.broadcast(hub.is_id(model.path)):  # as rank 0 sees it: a folder here may be missing elsewhere
        return
    log.info("model %s @ %s", model.path, str(model.revision)[:7])
    world.patiently(lambda: str(complete(recipe)), here=world.local_rank == 0)


def located(recipe: Recipe) -> Path:
    """Return the folder of a model of which little more than its commit is known yet. Raises ModelError."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_location.locate(model.path, model.revision)
    return registry.locate(model.path, model.family, model.revision)


def complete(recipe: Recipe) -> Path:
    """Return the folder of a model, once all its files are there. Raises ModelError."""
    model = recipe.model
    if recipe.algorithm.trains_language:
        return language_location.resolve(model.path, model.revision)
    return registry.resolve(model.path, model.family, model.revision)
