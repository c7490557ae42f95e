"""A recipe's steps beside those of the published loop in plain torch: `python -m benchmarks.gpu against RECIPE ...`.

Both live in one process and take turns, step by step, on models of equal size: the same numbers of samples, forwards
and backwards in the same batches. Each variant of ours has its own turns. The ratio is of the medians; the reference's
own spread says what a difference is worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import runs
from benchmarks.gpu.plain_steps import STEPS, PlainSteps
from benchmarks.gpu.reference import PlainSd3
from benchmarks.gpu.steps import add_recipes, rows, spread
from benchmarks.gpu.variants import Variant
from wfm_ds.models import registry
from wfm_ds.recipe.schema import Recipe


def reference(recipe: Recipe) -> PlainSteps:
    """The published loop of this recipe's algorithm."""
    folder = registry.resolve_pipeline(recipe.model.path, None)
    old = recipe.algorithm.name == "diffusion_nft"
    return STEPS[recipe.algorithm.name](PlainSd3(folder, recipe, runs.world().device, old=old))


def compared(recipe_path: Path, variant: Variant, overrides: Sequence[str], rounds: int) -> dict[str, Any]:
    with runs.environment(variant.environment), runs.opened(recipe_path, [*overrides, *variant.overrides]) as ours:
        plain = reference(ours.loop.job.recipe)
        seconds: dict[str, list[float]] = {"ours": [], "reference": []}
        for turn in range(1 + rounds):
            for who, step in (("ours", ours.step), ("reference", plain.step)):
                taken = runs.timed(step)
                if turn > 0:  # the first warms up
                    seconds[who].append(taken)
    found = {who: spread(values) for who, values in seconds.items()}
    ratio = found["reference"]["median"] / found["ours"]["median"]
    return {"ours s": found["ours"], "reference s": found["reference"], "times as fast": ratio}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipes(parser)
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return rows(args, lambda recipe, variant: compared(recipe, variant, args.set, args.rounds))
