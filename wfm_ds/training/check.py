"""Check a recipe (`--check`): everything that happens before the first step."""

from __future__ import annotations

from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.checked import Checked
from wfm_ds.training import language_build, preflight


def check(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Checked:
    """Check data, model, rewards and memory of a run with `world_size` ranks. Raises UserError if it cannot run."""
    check_recipe = language_build.examine if recipe.algorithm.trains_language else preflight.examine
    return check_recipe(recipe, world_size, overwrite=overwrite)
