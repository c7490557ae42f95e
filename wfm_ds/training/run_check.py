"""Check of a recipe (`--check`). It covers everything that a run does before its first step."""

from __future__ import annotations

from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.check_report import CheckReport
from wfm_ds.training import language_builder, preflight


def check_run(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> CheckReport:
    """Check data, model, rewards and memory of a run with `world_size` ranks. Raises UserError if it cannot run."""
    check_recipe = (
        language_builder.check_language_run if recipe.algorithm.trains_language else preflight.check_diffusion_run
    )
    return check_recipe(recipe, world_size, overwrite=overwrite)
