"""Compare a recipe's steps with the published loop in plain torch: `python -m benchmarks.gpu against RECIPE ...`.

Both run in one process and alternate, step by step, on models of equal size, with the same numbers of samples, forward
passes and backward passes in the same batches. Each of our variants is compared separately. The result is the ratio of
the medians; the range of the reference shows which differences are meaningful.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import runs
from benchmarks.gpu.plain_steps import STEPS, PlainSteps
from benchmarks.gpu.reference import PlainSd3
from benchmarks.gpu.steps import add_recipes, samples_per_step, variant_rows
from benchmarks.gpu.variants import RecipeVariant
from benchmarks.report import summarize
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe


def make_reference_loop(recipe: Recipe) -> PlainSteps:
    """Return the published loop of this recipe's algorithm."""
    folder = registry.resolve_pipeline(recipe.model.path, None)
    old = recipe.algorithm.name == "diffusion_nft"
    return STEPS[recipe.algorithm.name](PlainSd3(folder, recipe, runs.join_world().device, old=old))


def compare_loops(recipe_path: Path, variant: RecipeVariant, overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    with (
        runs.set_environment(variant.environment),
        runs.open_run(recipe_path, [*overrides, *variant.overrides]) as ours,
    ):
        recipe = ours.loop.job.recipe
        plain = make_reference_loop(recipe)
        seconds: dict[str, list[float]] = {"ours": [], "reference": []}
        for turn in range(1 + rounds):
            for side, step in (("ours", ours.run_step), ("reference", plain.step)):
                step_s = runs.time_call(step)
                if turn > 0:  # the first round is a warm-up
                    seconds[side].append(step_s)
    found = {side: summarize(values) for side, values in seconds.items()}
    ratio = found["reference"]["median"] / found["ours"]["median"]
    row: dict[str, Any] = {"samples": samples_per_step(recipe)}
    return row | {"ours s": found["ours"], "reference s": found["reference"], "times as fast": ratio}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipes(parser)
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return variant_rows(args, lambda recipe, variant: compare_loops(recipe, variant, args.set, args.rounds))
