"""Snapshot of the service for the status page and Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wfm_ds.transport.tasks import BrokerStatus
from wfm_reward.stats import RewardStats
from wfm_reward.worker_pool import WorkerState


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """State of the whole service at one point in time."""

    version: str
    uptime_s: float
    broker: BrokerStatus
    rewards: Sequence[str]  # in the order of the configuration
    stats: Mapping[str, RewardStats]  # only rewards that have scored anything
    workers: Sequence[WorkerState]
    down_reasons: Mapping[str, str]  # by reward
    requests: Counter[tuple[str, int]]  # by endpoint and status
    pending_bytes: int  # unscored images and videos received over HTTP
    now_s: float  # time.monotonic
    wall_s: float

    def num_waiting(self, reward: str) -> int:
        return self.broker.kinds.get(f"score:{reward}", (0, 0))[0]

    def num_leased(self, reward: str) -> int:
        return self.broker.kinds.get(f"score:{reward}", (0, 0))[1]

    def reward_stats(self, reward: str) -> RewardStats:
        return self.stats.get(reward) or RewardStats()

    def reward_state(self, reward: str) -> str:
        """Return the state of a reward: loading, ready, degraded (some workers are missing) or down."""
        ready = [worker.ready for worker in self.workers if worker.reward == reward]
        if reward in self.down_reasons:
            return "down"
        if all(ready):
            return "ready"
        restarted = any(worker.restarts for worker in self.workers if worker.reward == reward)
        return "degraded" if any(ready) or restarted else "loading"


def read_clocks() -> tuple[float, float]:
    """Return (time of the monotonic clock, time of the wall clock) in seconds."""
    return time.monotonic(), time.time()
