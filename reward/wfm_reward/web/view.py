"""One moment of the service, for the status page and for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wfm_ds.pipes.status import HubStatus
from wfm_reward.scorers import ScorerState
from wfm_reward.stats import RewardStats


@dataclass(frozen=True, slots=True)
class View:
    """The state of the whole service."""

    version: str
    uptime_s: float
    hub: HubStatus
    rewards: Sequence[str]  # in the configuration's order
    stats: Mapping[str, RewardStats]  # of those that have scored anything
    workers: Sequence[ScorerState]
    down: Mapping[str, str]  # rewards that were given up, and why
    requests: Counter[tuple[str, int]]  # by endpoint and status
    pending_bytes: int  # of media that came over HTTP and are not scored yet
    now_s: float  # on time.monotonic
    wall_s: float

    def waiting(self, reward: str) -> int:
        return self.hub.kinds.get(f"score:{reward}", (0, 0))[0]

    def leased(self, reward: str) -> int:
        return self.hub.kinds.get(f"score:{reward}", (0, 0))[1]

    def of(self, reward: str) -> RewardStats:
        return self.stats.get(reward) or RewardStats()

    def state(self, reward: str) -> str:
        """loading, ready, degraded (some of its workers are not there) or down."""
        ready = [worker.ready for worker in self.workers if worker.reward == reward]
        if reward in self.down:
            return "down"
        if all(ready):
            return "ready"
        restarted = any(worker.restarts for worker in self.workers if worker.reward == reward)
        return "degraded" if any(ready) or restarted else "loading"


def clock() -> tuple[float, float]:
    """The monotonic clock and the wall clock."""
    return time.monotonic(), time.time()
