"""Check of a recipe: everything before the first step, of whatever it trains."""

from __future__ import annotations

from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.checked import Checked
from wfm_ds.training import language_build, preflight


def check(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Checked:
    """Check a run of that many ranks: data, model, rewards, memory. Raises UserError for what cannot be run."""
    examine = language_build.examine if recipe.algorithm.trains_language else preflight.examine
    return examine(recipe, world_size, overwrite=overwrite)
