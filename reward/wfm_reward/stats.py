"""Statistics of each reward of the service: counts, times, and the latest scores, failures and samples."""

from __future__ import annotations

import bisect
import copy
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.transport.tasks import BrokerStatus, FinishedTask
from wfm_reward.worker_pool import WorkerState

BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_REASONS = 30  # failure classes per reward; more are counted as "other"
NUM_SCORES = 1000
NUM_FAILURES = 8
NUM_SAMPLES = 4
SAMPLE_EVERY_S = 1.0
THUMBNAIL = 160  # maximum length of the longer side in pixels
RATE_WINDOW_S = 60.0
MAX_BATCHES = 1000


@dataclass(slots=True)
class TimeHistogram:
    """Prometheus histogram of seconds per item."""

    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))

    def add(self, seconds: float, items: int) -> None:
        self.total += seconds * items
        self.counts[bisect.bisect_left(BUCKETS_S, seconds)] += items


@dataclass(frozen=True, slots=True)
class FailedItem:
    at_s: float  # wall clock
    sample_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A scored image, or the first frame of a scored video."""

    at_s: float  # wall clock
    sample_id: str
    prompt: str
    image: npt.NDArray[np.uint8]  # thumbnail [h,w,3]: every n-th pixel
    value: float | None  # None if scoring failed
    parts: Mapping[str, float]


@dataclass(slots=True)
class RewardStats:
    scored: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # {failure class: items}
    score_s: TimeHistogram = field(default_factory=TimeHistogram)  # per item: batch time / batch size
    wait_s: TimeHistogram = field(default_factory=TimeHistogram)  # per item: queueing time until its batch started
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SCORES))
    batch_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_BATCHES))
    failures: deque[FailedItem] = field(default_factory=lambda: deque(maxlen=NUM_FAILURES))
    samples: deque[ScoredSample] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    recent_ends: deque[tuple[float, int]] = field(default_factory=deque)  # (monotonic time, items) of the last minute

    def items_per_minute(self, now_s: float) -> float:
        return float(sum(items for at_s, items in self.recent_ends if now_s - at_s <= RATE_WINDOW_S))


class ServiceStats:
    """Thread-safe statistics of all rewards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rewards: dict[str, RewardStats] = {}

    def snapshot(self) -> dict[str, RewardStats]:
        with self._lock:
            return {name: _copy_stats(stats) for name, stats in self._rewards.items()}

    def record_task(self, ended: FinishedTask) -> None:
        """Add a finished scoring task. Called in the broker's thread."""
        kind, _, name = ended.kind.partition(":")
        if kind != "score":
            return
        scores = _task_scores(ended)
        now_s, wall_s = time.monotonic(), time.time()
        with self._lock:
            stats = self._rewards.setdefault(name, RewardStats())
            for row, (value, failure, _parts) in zip(ended.rows, scores, strict=True):
                if failure is None:
                    stats.scored += 1
                    stats.scores.append(value)
                else:
                    stats.failed[_failure_class(failure, stats.failed)] += 1
                    stats.failures.append(FailedItem(wall_s, str(row.get("id", "")), failure))
            count = len(ended.rows)
            if ended.completion.ok:
                stats.score_s.add(ended.completion.seconds / max(1, count), count)
                stats.wait_s.add(ended.waited_s, count)
                stats.batch_sizes.append(int(ended.completion.meta.get("batch", count)))
            stats.recent_ends.append((now_s, count))
            while now_s - stats.recent_ends[0][0] > RATE_WINDOW_S:
                stats.recent_ends.popleft()
            if scores and (not stats.samples or wall_s - stats.samples[-1].at_s >= SAMPLE_EVERY_S):
                sample = _extract_sample(ended, scores[0], wall_s)
                if sample is not None:
                    stats.samples.append(sample)


def _copy_stats(stats: RewardStats) -> RewardStats:
    histograms = {name: copy.deepcopy(getattr(stats, name)) for name in ("score_s", "wait_s")}
    names = ("failed", "scores", "batch_sizes", "failures", "samples", "recent_ends")
    return replace(stats, **histograms, **{name: getattr(stats, name).copy() for name in names})


def _task_scores(ended: FinishedTask) -> list[Any]:
    """Return (value, failure, parts) for each row of a finished task."""
    rows, scores = ended.rows, ended.completion.meta.get("scores")
    if not ended.completion.ok:
        return [(None, ended.completion.reason, {})] * len(rows)
    if not isinstance(scores, list | tuple) or len(scores) != len(rows) or not all(len(s) == 3 for s in scores):
        return [(None, "the reply of its worker cannot be read", {})] * len(rows)
    return list(scores)


def _failure_class(reason: str, known: Mapping[str, int]) -> str:
    name = re.sub(r"'[^']*'|\d+(\.\d+)?", "N", reason.partition(":")[0])[:60]
    return name if name in known or len(known) < MAX_REASONS else "other"


def _extract_sample(ended: FinishedTask, score: Any, wall_s: float) -> ScoredSample | None:
    spec = ended.specs[0] if ended.specs else None
    if spec is None or spec.dtype != "uint8" or len(spec.shape) not in (3, 4) or spec.shape[-1] != 3:
        return None
    height, width, _ = spec.shape[-3:]
    pixels = ended.first_bytes(height * width * 3)
    if not pixels or len(pixels) != height * width * 3:
        return None
    step = -(-max(height, width) // THUMBNAIL)
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)[::step, ::step].copy()
    row, (value, _, parts) = ended.rows[0], score
    return ScoredSample(wall_s, str(row.get("id", "")), str(row.get("prompt", "")), image, value, dict(parts))


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
