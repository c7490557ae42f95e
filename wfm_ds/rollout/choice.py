"""Selection of an RL step's groups from the groups generated over several rounds.

Pure functions of their inputs: every rank selects the same groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from wfm_ds.rollout.members import RolloutSample


class Choice:
    """The groups selected so far for one RL step.

    A group is informative if its rewards differ. Informative groups are always selected. Other groups only fill the
    step until later rounds replace them with informative ones.
    """

    def __init__(self, num_groups: int) -> None:
        """num_groups: number of groups in an RL step."""
        self.num_groups = num_groups
        self.num_dropped = 0  # groups that are not informative, replaced or not
        self._teaching: list[list[RolloutSample]] = []
        self._others: list[list[RolloutSample]] = []

    @property
    def num_missing(self) -> int:
        """Number of groups that the next round must generate."""
        return self.num_groups - len(self._teaching)

    def add(self, members: Sequence[RolloutSample], teaching: Collection[str]) -> None:
        """Add the selected samples of one round, at most `num_missing` groups.

        informative: ids of the groups with unequal rewards.
        """
        groups: dict[str, list[RolloutSample]] = {}
        for member in members:
            groups.setdefault(member.group_id, []).append(member)
        self._teaching += [group for group_id, group in groups.items() if group_id in teaching]
        self._others += [group for group_id, group in groups.items() if group_id not in teaching]
        self.num_dropped = len(self._others)

    @property
    def members(self) -> list[RolloutSample]:
        """The samples of `num_groups` groups: informative groups first, each kind in the order of generation."""
        return [member for group in [*self._teaching, *self._others][: self.num_groups] for member in group]


def correlation_in_groups(
    first: Sequence[float | None], second: Sequence[float | None], groups: Sequence[str]
) -> float | None:
    """Return Pearson's correlation of two rewards after subtracting each group's mean.

    Samples without both rewards are ignored. Returns None if one of the rewards is constant within every group.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for a, b, group in zip(first, second, groups, strict=True):
        if a is not None and b is not None:
            pairs.setdefault(group, []).append((a, b))
    if not pairs:
        return None
    centred = np.concatenate([np.array(rewards) - np.mean(rewards, axis=0) for rewards in pairs.values()])
    norms = np.sqrt(np.square(centred).sum(axis=0))
    if not (norms > 1e-9 * max(1.0, float(np.abs(centred).max()))).all():
        return None
    return float((centred[:, 0] * centred[:, 1]).sum() / (norms[0] * norms[1]))
