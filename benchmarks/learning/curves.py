"""The curve of one run: validation reward, held-out classifier and reward std over the cost so far."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression

from benchmarks.flops import step_forwards
from wfm_ds.demos.digits import load_samples, std_within_prompts
from wfm_ds.demos.few_steps import FORWARD_SAMPLES, step_cost
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes

REWARD, UNSEEN = "val/reward/digits/mean", "val/reward/digits/second_judge/mean"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The validation samples of one RL step, and the cost of the run so far, without evaluations."""

    step: int
    forwards: float  # samples through the denoiser, plus BACKWARD_COST for each with a gradient
    seconds: float
    reward: float
    unseen: float
    spread: float


def read_evaluations(run: Path) -> list[Evaluation]:
    """Read a run's curve. Raises UserError for a run of a revision that did not count samples."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = derive_run_sizes(recipe_file.load_stored_recipe(run / "recipe.yaml"), 1).updates_per_step
    return [make_evaluation(run, record, records, updates) for record in records if REWARD in record]


def make_evaluation(run: Path, at: Mapping[str, Any], records: Sequence[Mapping[str, Any]], updates: int) -> Evaluation:
    done = [record for record in records if 0 < record["step"] <= at["step"]]
    step = at["step"] // updates  # metrics count optimizer steps
    if done and not any(key.startswith(FORWARD_SAMPLES) for key in done[0]):
        raise UserError(f"{run}/metrics.jsonl has no {FORWARD_SAMPLES}*: it is from another revision, remove it")
    return Evaluation(
        step=step,
        forwards=sum(map(step_cost, done)),
        seconds=sum(record.get("time/step", 0.0) - record.get("time/validation", 0.0) for record in done),
        reward=at[REWARD],
        unseen=at[UNSEEN],
        spread=std_within_prompts(load_samples(run / "samples" / f"step_{step}")),
    )


def find_crossing(positions: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """Return the position at which the values reach `level`, on the closest non-decreasing piecewise linear curve. None
    if they do not reach it."""
    fitted = IsotonicRegression().fit_transform(np.asarray(positions), np.asarray(values))
    reached = np.flatnonzero(fitted >= level)
    if not len(reached):
        return None
    last = reached[0]
    if last == 0:
        return float(positions[0])
    fraction = (level - fitted[last - 1]) / (fitted[last] - fitted[last - 1])
    return float(positions[last - 1] + fraction * (positions[last] - positions[last - 1]))


def check_counts(run: Path) -> None:
    """Compare a run's counted samples with the prediction from its recipe. Raises UserError if they differ.

    Samples without reward differences in their group may be dropped from training, but not from the rollout.
    """
    recipe = recipe_file.load_stored_recipe(run / "recipe.yaml")
    derived = derive_run_sizes(recipe, 1)
    model = registry.load_model(recipe.model.path, dtype=torch.float32, device="cpu")
    predicted = step_forwards(recipe, derived, model)
    trains_all = not recipe.rl.algorithm.drops_zero_std
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for purpose in sorted({purpose for step in predicted for purpose in step}):
        expected = sum(step[purpose].samples for step in predicted if purpose in step)
        counted = sum(record.get(f"{FORWARD_SAMPLES}{purpose}", 0.0) for record in records)
        exact = purpose == "rollout" or trains_all
        if counted > expected or (exact and counted != expected):
            raise UserError(
                f"{run}: {counted:.0f} samples through the denoiser for {purpose}, its recipe predicts {expected:.0f}"
            )


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if one of the values is None."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None
