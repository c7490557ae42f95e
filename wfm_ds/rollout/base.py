"""Interface between the RL loop and the source of its rollouts."""

from __future__ import annotations

from typing import Protocol

from wfm_ds.rollout.groups import GroupSource, StepRollouts
from wfm_ds.types import Score


class RolloutSource(Protocol):
    """Generates the samples of each RL step and collects their reward scores. All methods are collective."""

    groups: GroupSource

    def publish_policy(self, step: int) -> None:
        """Make the policy after RL step `step` available for rollouts. Also called once before the first step."""

    def wait_until_ready(self, step: int) -> bool:
        """Wait until the samples of this RL step are available. Returns False if a rank gets a stop request first."""

    def collect_rollouts(self, step: int) -> StepRollouts:
        """Return the samples of this RL step. Only the samples of this replica have latents."""

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """Return a dict {reward name: Score} for each sample in `rollouts.samples`, in this order.

        The result includes the samples of all ranks.
        """

    def step_metrics(self) -> dict[str, float]:
        """Return the metrics of the last call of `collect_rollouts`. They are identical on every rank."""
