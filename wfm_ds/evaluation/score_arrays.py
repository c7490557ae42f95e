"""Scores of one model as arrays [prompts, seeds], NaN for missing scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wfm_ds.algorithms.advantages import combine_scores
from wfm_ds.evaluation.paired_statistics import Array
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Score

SampleScores = Sequence[Mapping[str, Score]]
"""Scores of each sample by reward, ordered by prompt, then by seed."""


def scores_by_reward(samples: SampleScores, num_seeds: int) -> dict[str, Array]:
    """Return {reward: scores [P, S]}, and {`reward/part`: [P, S]} for rewards that report partial scores."""
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    arrays = {name: reshape_scores([sample[name].value for sample in samples], num_seeds) for name in names}
    for name in names:
        for part in sorted({part for sample in samples for part in sample[name].parts}):
            arrays[f"{name}/{part}"] = reshape_scores([sample[name].parts.get(part) for sample in samples], num_seeds)
    return arrays


def total_rewards(samples: SampleScores, num_seeds: int, reward: RewardRecipe) -> Array:
    """Return the total rewards [P, S]: the weighted sums that `reward` defines."""
    return reshape_scores(combine_scores(samples, reward).totals, num_seeds)


def unit_std_reward_recipe(names: Sequence[str], base: Mapping[str, Array]) -> RewardRecipe:
    """Return a recipe that weights each reward by 1 / its std over the base model's samples (by 1 if the std is 0)."""
    functions = []
    for name in names:
        valid = base[name][~np.isnan(base[name])]
        std = float(valid.std(ddof=1)) if len(valid) > 1 else 0.0
        functions.append(RewardFunction(name=name, weight=1 / std if std > 0 else 1.0))
    return RewardRecipe(functions=functions)


def reshape_scores(values: Sequence[float | None], num_seeds: int) -> Array:
    """Reshape one value per sample to [P, S], with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], np.float64).reshape(-1, num_seeds)
