"""Reward-hacking alarm: the trained reward increases while a held-out reward decreases.

Each evaluation is compared with the first one, sample by sample. To keep false alarms rare in runs with many
evaluations, a held-out reward must meet three conditions:
* p < .01 after Holm's correction over the held-out rewards;
* a decrease of at least a tenth of a standard deviation;
* both of these in two consecutive evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wfm_ds.evaluation.paired_statistics import Array, compare_scores
from wfm_ds.evaluation.results import find_decreases
from wfm_ds.storage.atomic import finite_or_none

SIGNIFICANCE_LEVEL = 0.01
RECOMMENDED_PROMPTS = 32
"""Recommended number of validation prompts. With fewer, a decrease of half a standard deviation is often missed."""


class RewardAlarm:
    """Compares each evaluation with the first one, identically on every rank."""

    def __init__(self, key: Sequence[Any]) -> None:
        """key: prompts, seeds and reward names as JSON. `load_state_dict` ignores states with a different key."""
        self._key = list(key)
        self._first: dict[str, Array] = {}  # total reward (key "") and held-out rewards at the first evaluation
        self._suspects: set[str] = set()
        self.falling_rewards: dict[str, float] = {}  # {reward that raises the alarm now: its decrease in sd}

    def update(self, total: Array | None, held_out_rewards: Mapping[str, Array]) -> dict[str, float]:
        """Compare an evaluation with the first one, set `falling_rewards` and return metrics.

        total: trained reward [P prompts, S seeds], or None in runs without a trained reward.
        held_out_rewards: {name: held-out reward [P prompts, S seeds]}.
        Returns {} for the first evaluation.
        """
        scores_by_name = {**({} if total is None else {"": total}), **held_out_rewards}
        if not self._first:
            self._first = scores_by_name
            return {}
        changes = {name: compare_scores(self._first[name], scores) for name, scores in scores_by_name.items()}
        falling = find_decreases(
            {name: change for name, change in changes.items() if change and name}, SIGNIFICANCE_LEVEL
        )
        total_rose = (change := changes.get("")) is not None and change.estimate.is_above_zero
        suspects = set(falling) if total_rose else set()
        confirmed = {name: -change.z for name in sorted(suspects & self._suspects) if (change := changes[name])}
        self._suspects, self.falling_rewards = suspects, confirmed
        metrics = {f"val/held_out/{name}/change": c.estimate.value for name, c in changes.items() if c and name}
        return metrics | ({} if total is None else {"val/alarm": float(bool(self.falling_rewards))})

    def summary(self) -> str:
        fell = ", ".join(f"{name} by {decrease:.2g} sd" for name, decrease in self.falling_rewards.items())
        return f"since the first evaluation the trained reward rose and {fell} fell, in two consecutive evaluations"

    def state_dict(self) -> dict[str, Any]:
        rows = {name: scores.tolist() for name, scores in self._first.items()}
        first = {name: [[finite_or_none(score) for score in row] for row in table] for name, table in rows.items()}
        return {"key": self._key, "first": first, "suspects": sorted(self._suspects), "falling": self.falling_rewards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. It is ignored if it was saved with other prompts, seeds or held-out rewards."""
        if state.get("key") == self._key:
            self._first = {name: np.array(rows, np.float64) for name, rows in state["first"].items()}
            self._suspects = set(state["suspects"])
            self.falling_rewards = dict(state.get("falling", {}))
