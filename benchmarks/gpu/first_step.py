"""The first step of recipes: `python -m benchmarks.gpu first_step RECIPE ...`.

Loss and gradient must be finite, and the first policy ratios must be 1 within the clip range.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import runs
from benchmarks.gpu.steps import add_recipes, variant_rows
from benchmarks.gpu.variants import RecipeVariant

# Columns and metrics. Before the first update, both policies of a ratio have the same weights.
NUMBERS = {"loss": "loss/total", "gradient norm": "optim/grad_norm"}
RATIO, RATIO_METRIC = "mean distance of ratios from 1", "policy/ratio_start_abs_dev"


def check_first_step(recipe_path: Path, variant: RecipeVariant, overrides: Sequence[str]) -> dict[str, Any]:
    """Run one step. Return its seconds and numbers, and an error if a number is wrong."""
    with (
        runs.set_environment(variant.environment),
        runs.open_run(recipe_path, [*overrides, *variant.overrides]) as run,
    ):
        seconds, recipe = runs.time_call(run.run_step), run.loop.job.recipe
        metrics = run.metric_lines()[-1]
    clip = getattr(recipe.algorithm, "clip_ratio", None)
    return {"s": seconds, **check_metrics(metrics, clip if isinstance(clip, float) else None)}


def check_metrics(metrics: Mapping[str, float], clip_ratio: float | None) -> dict[str, Any]:
    """Return the row of a step's metrics, with an error if a number is not finite, or if the first ratios are so far
    from 1 that they are clipped. clip_ratio: None if the algorithm clips no ratios."""
    row: dict[str, Any] = {column: metrics[metric] for column, metric in NUMBERS.items()}
    wrong = [f"{column} is {value}" for column, value in row.items() if not math.isfinite(value)]
    if clip_ratio is not None:
        row[RATIO] = metrics[RATIO_METRIC]
        if not row[RATIO] < clip_ratio:
            wrong.append(f"{RATIO} is {row[RATIO]}, and ratios are clipped at {clip_ratio:g}")
    return row | ({"error": "; ".join(wrong)} if wrong else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipes(parser)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return variant_rows(args, lambda recipe, variant: check_first_step(recipe, variant, args.set))
