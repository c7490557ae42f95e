"""Scores of one model as arrays: a row for each prompt, a column for each seed, NaN where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wfm_ds.algorithms.advantages import step_rewards
from wfm_ds.evaluation.paired import Array
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Score

Samples = Sequence[Mapping[str, Score]]
"""Scores of each sample by reward, prompt by prompt and within these seed by seed."""


def by_reward(samples: Samples, num_seeds: int) -> dict[str, Array]:
    """Arrays [P, S] by reward, and by `reward/part` for its parts."""
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    found = {name: table([sample[name].value for sample in samples], num_seeds) for name in names}
    for name in names:
        for part in sorted({part for sample in samples for part in sample[name].parts}):
            found[f"{name}/{part}"] = table([sample[name].parts.get(part) for sample in samples], num_seeds)
    return found


def totals(samples: Samples, num_seeds: int, reward: RewardRecipe) -> Array:
    """The rewards [P, S] that a run of this recipe would train on."""
    return table(step_rewards(samples, reward).totals, num_seeds)


def without_weights(names: Sequence[str], base: Mapping[str, Array]) -> RewardRecipe:
    """A recipe that sums these rewards where no run says how: each in units of its spread over the base's samples."""
    functions = []
    for name in names:
        known = base[name][~np.isnan(base[name])]
        spread = float(known.std(ddof=1)) if len(known) > 1 else 0.0
        functions.append(RewardFunction(name=name, weight=1 / spread if spread > 0 else 1.0))
    return RewardRecipe(functions=functions)


def table(values: Sequence[float | None], num_seeds: int) -> Array:
    """Values as [P, S], None as NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64).reshape(-1, num_seeds)
