"""The curve of one run: held-out reward, unseen judge and spread over what the run had cost by then."""

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
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.quickstart.digits import load_samples, std_within_prompts
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes

REWARD, UNSEEN = "val/reward/digits/mean", "val/reward/digits/second_judge/mean"
FORWARDED, VALIDATION = "perf/forward_samples_", "perf/forward_samples_validation"
BACKWARD = 2  # forwards that a backward pass costs: gradients of inputs and of weights


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out samples of one RL step, and what the run had cost by then, without its evaluations."""

    step: int
    forwards: float  # samples through the denoiser, BACKWARD more for each with a gradient
    seconds: float
    reward: float
    unseen: float
    spread: float


def evaluations(run: Path) -> list[Evaluation]:
    """Read a run's curve. Raises UserError for one of a revision that did not count samples."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = derive_run_sizes(recipe_file.load_stored_recipe(run / "recipe.yaml"), 1).updates_per_step
    return [evaluation(run, record, records, updates) for record in records if REWARD in record]


def evaluation(run: Path, at: Mapping[str, Any], records: Sequence[Mapping[str, Any]], updates: int) -> Evaluation:
    done = [record for record in records if 0 < record["step"] <= at["step"]]
    step = at["step"] // updates  # metrics count optimizer steps
    if done and not any(key.startswith(FORWARDED) for key in done[0]):
        raise UserError(f"{run}/metrics.jsonl has no {FORWARDED}*: a run of another revision, remove it")
    return Evaluation(
        step=step,
        forwards=sum(map(cost, done)),
        seconds=sum(record.get("time/step", 0.0) - record.get("time/validation", 0.0) for record in done),
        reward=at[REWARD],
        unseen=at[UNSEEN],
        spread=std_within_prompts(load_samples(run / "samples" / f"step_{step}")),
    )


def cost(record: Mapping[str, Any]) -> float:
    """Return the forwards that the work behind a line of metrics.jsonl is worth, evaluations left out."""
    counted: dict[str, float] = {k: v for k, v in record.items() if k.startswith(FORWARDED) and k != VALIDATION}
    return sum(counted.values()) + BACKWARD * counted.get(f"{FORWARDED}policy", 0.0)


def crossing(places: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """Return the place at which the values reach `level`: where the closest curve that never falls does, which is
    straight between neighbours. None: it does not."""
    fitted = IsotonicRegression().fit_transform(np.asarray(places), np.asarray(values))
    reached = np.flatnonzero(fitted >= level)
    if not len(reached):
        return None
    last = reached[0]
    if last == 0:
        return float(places[0])
    share = (level - fitted[last - 1]) / (fitted[last] - fitted[last - 1])
    return float(places[last - 1] + share * (places[last] - places[last - 1]))


def check_counts(run: Path) -> None:
    """Compare what the run counted with what its recipe says it would. Raises UserError where they differ.

    Rewards that are equal within a group may leave samples out of training, never out of the rollout.
    """
    recipe = recipe_file.load_stored_recipe(run / "recipe.yaml")
    derived = derive_run_sizes(recipe, 1)
    model = registry.load_model(recipe.model.path, dtype=torch.float32, device="cpu")
    predicted = step_forwards(recipe, derived, model)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for purpose in sorted({purpose for step in predicted for purpose in step}):
        said = sum(step[purpose].samples for step in predicted if purpose in step)
        counted = sum(record.get(f"{FORWARDED}{purpose}", 0.0) for record in records)
        exact = purpose == "rollout" or not recipe.rl.algorithm.drops_zero_std
        if counted > said or (exact and counted != said):
            raise UserError(
                f"{run}: {counted:.0f} samples through the denoiser for {purpose}, its recipe says {said:.0f}"
            )


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean; None where one of them is."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None
