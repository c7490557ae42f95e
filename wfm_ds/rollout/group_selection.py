"""Selects the groups of an RL step from the groups generated over several rounds.

The selection depends only on the inputs of the functions, so it is identical on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from wfm_ds.rollout.groups import RolloutSample


class GroupSelection:
    """Groups selected so far for one RL step.

    A group is informative if its samples have different rewards. The selection contains other groups only until later
    rounds generate enough informative groups.
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups  # in an RL step
        self.num_dropped = 0  # groups that are not informative, replaced or not
        self._informative_groups: list[list[RolloutSample]] = []
        self._other_groups: list[list[RolloutSample]] = []

    @property
    def num_missing(self) -> int:
        """Number of groups that the next round must generate."""
        return self.num_groups - len(self._informative_groups)

    def add_round(self, samples: Sequence[RolloutSample], informative: Collection[str]) -> None:
        """Add the samples of at most `num_missing` groups. informative: ids of the informative groups."""
        groups: dict[str, list[RolloutSample]] = {}
        for member in samples:
            groups.setdefault(member.group_id, []).append(member)
        self._informative_groups += [group for group_id, group in groups.items() if group_id in informative]
        self._other_groups += [group for group_id, group in groups.items() if group_id not in informative]
        self.num_dropped = len(self._other_groups)

    @property
    def selected_samples(self) -> list[RolloutSample]:
        """Samples of the selected groups. Informative groups come first.

        Within both kinds, groups are in the order of generation.
        """
        return [
            member for group in [*self._informative_groups, *self._other_groups][: self.num_groups] for member in group
        ]


def within_group_correlation(
    first: Sequence[float | None], second: Sequence[float | None], group_ids: Sequence[str]
) -> float | None:
    """Return Pearson's correlation of two rewards after subtraction of each group's mean reward.

    Samples without both rewards are ignored. Returns None if no sample has both rewards, or if one of the rewards is
    constant within every group.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for a, b, group in zip(first, second, group_ids, strict=True):
        if a is not None and b is not None:
            pairs.setdefault(group, []).append((a, b))
    if not pairs:
        return None
    centred = np.concatenate([np.array(rewards) - np.mean(rewards, axis=0) for rewards in pairs.values()])
    norms = np.sqrt(np.square(centred).sum(axis=0))
    if not (norms > 1e-9 * max(1.0, float(np.abs(centred).max()))).all():
        return None
    return float((centred[:, 0] * centred[:, 1]).sum() / (norms[0] * norms[1]))
