"""The choice of an RL step's groups among those that were generated for it, round by round. Pure: every rank makes the
same one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from wfm_ds.rollout.members import RolloutSample


class Choice:
    """Begins without groups. A round adds some: those that teach stay, and the others stand in for groups that teach
    until later rounds bring these."""

    def __init__(self, num_groups: int) -> None:
        """num_groups: of an RL step."""
        self.num_groups = num_groups
        self.num_dropped = 0  # groups that do not teach, replaced or not
        self._teaching: list[list[RolloutSample]] = []
        self._others: list[list[RolloutSample]] = []

    @property
    def num_missing(self) -> int:
        """Groups that the next round is to generate."""
        return self.num_groups - len(self._teaching)

    def add(self, members: Sequence[RolloutSample], teaching: Collection[str]) -> None:
        """Take up the chosen members of a round's groups, at most num_missing; teaching: the ids of groups whose
        rewards are not all equal."""
        groups: dict[str, list[RolloutSample]] = {}
        for member in members:
            groups.setdefault(member.group_id, []).append(member)
        self._teaching += [group for group_id, group in groups.items() if group_id in teaching]
        self._others += [group for group_id, group in groups.items() if group_id not in teaching]
        self.num_dropped = len(self._others)

    @property
    def members(self) -> list[RolloutSample]:
        """The members of num_groups groups in the order in which they were generated, first those that teach."""
        return [member for group in [*self._teaching, *self._others][: self.num_groups] for member in group]


def correlation_in_groups(
    first: Sequence[float | None], second: Sequence[float | None], groups: Sequence[str]
) -> float | None:
    """Pearson's correlation of two rewards of the same samples, each less the mean of its group, over the samples that
    have both; None where one of the two does not vary in any group."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for a, b, group in zip(first, second, groups, strict=True):
        if a is not None and b is not None:
            pairs.setdefault(group, []).append((a, b))
    if not pairs:
        return None
    centred = np.concatenate([np.array(of_group) - np.mean(of_group, axis=0) for of_group in pairs.values()])
    spread = np.sqrt(np.square(centred).sum(axis=0))
    if not (spread > 1e-9 * max(1.0, float(np.abs(centred).max()))).all():
        return None
    return float((centred[:, 0] * centred[:, 1]).sum() / (spread[0] * spread[1]))
