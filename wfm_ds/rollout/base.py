"""Interface between the RL loop and the source of its rollouts."""

from __future__ import annotations

from typing import Protocol

from wfm_ds.rollout.groups import GroupSource
from wfm_ds.rollout.members import StepRollouts
from wfm_ds.types import Score


class Source(Protocol):
    """Samples and their scores, step by step. All methods are collective."""

    groups: GroupSource

    def publish(self, step: int) -> None:
        """Make the policies after RL step `step` available for generation.

        Called before the first step with the number of the last finished step, then after every step.
        """

    def wait(self, step: int) -> bool:
        """Wait until the samples of this step are available. Return False if a rank should stop first."""

    def next(self, step: int) -> StepRollouts:
        """Return the samples of this step. Latents are present for the local samples only."""

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """Return {reward: Score} for every sample of all ranks. Same order on every rank."""

    def stats(self) -> dict[str, float]:
        """Return the metrics of the last `collect_rollouts`. Identical on every rank."""
