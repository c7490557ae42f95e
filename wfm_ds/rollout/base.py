"""Interface of a source of rollouts for the RL loop, which cannot tell which source it has."""

from __future__ import annotations

from typing import Protocol

from wfm_ds.rollout.groups import GroupSource
from wfm_ds.rollout.members import StepRollouts
from wfm_ds.types import Score


class Source(Protocol):
    """Samples and their scores, step by step. Every rank calls every method at the same place."""

    groups: GroupSource

    def publish(self, step: int) -> None:
        """The policies have moved after RL step `step` (before the first one to be done: the last one done); what
        comes may be generated with them."""

    def wait(self, step: int) -> bool:
        """Return once the samples of this step can be had at once; False if a rank is asked to stop before."""

    def next(self, step: int) -> StepRollouts:
        """The samples of this step, this rank's in full."""

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """{reward: Score} of every member on all ranks, in member order."""

    def stats(self) -> dict[str, float]:
        """Metrics of the last `next`, equal on all ranks."""
