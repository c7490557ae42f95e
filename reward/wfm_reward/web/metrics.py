"""GET /metrics: Prometheus metrics of the service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wfm_reward.stats import BUCKETS_S, RewardStats, Times
from wfm_reward.web.view import View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(view: View) -> bytes:
    """Return the metrics in Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ViewCollector(view))
    return generate_latest(registry)


class _ViewCollector(Collector):
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        yield from _of_rewards(self._view)
        yield from _of_workers(self._view)
        yield from _of_service(self._view)


def _of_rewards(view: View) -> Iterator[Metric]:
    items = CounterMetricFamily("wfm_reward_items", "Scored and failed items", labels=["reward", "outcome"])
    failures = CounterMetricFamily("wfm_reward_failures", "Failed items by failure class", labels=["reward", "reason"])
    score_s = HistogramMetricFamily("wfm_reward_score_seconds", "Seconds to score an item", labels=["reward"])
    wait_s = HistogramMetricFamily("wfm_reward_wait_seconds", "Seconds until scoring starts", labels=["reward"])
    for name in view.rewards:
        stats = view.of(name)
        items.add_metric([name, "scored"], stats.scored)
        items.add_metric([name, "failed"], stats.failed.total())
        for reason, count in stats.failed.items():
            failures.add_metric([name, reason], count)
        score_s.add_metric([name], _buckets(stats.score_s), stats.score_s.total)
        wait_s.add_metric([name], _buckets(stats.wait_s), stats.wait_s.total)
    yield from (items, failures, score_s, wait_s)
    gauges: list[tuple[str, str, Callable[[RewardStats], float | None]]] = [
        ("wfm_reward_batch_items", "Mean size of recent batches", lambda s: _mean(s.batches)),
        ("wfm_reward_score_mean", "Mean of the last 1000 scores", lambda s: _mean(s.scores)),
        ("wfm_reward_items_per_minute", "Items finished in the last minute", lambda s: s.per_minute(view.now_s)),
    ]
    for metric, text, value_of in gauges:
        gauge = GaugeMetricFamily(metric, text, labels=["reward"])
        for name in view.rewards:
            value = value_of(view.of(name))
            if value is not None:
                gauge.add_metric([name], value)
        yield gauge


def _of_workers(view: View) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("wfm_reward_waiting", "Queued tasks", labels=["reward"])
    leased = GaugeMetricFamily("wfm_reward_leased", "Running tasks", labels=["reward"])
    workers = GaugeMetricFamily("wfm_reward_workers", "Worker processes", labels=["reward", "state"])
    restarts = CounterMetricFamily("wfm_reward_worker_restarts", "Worker restarts", labels=["reward"])
    for name in view.rewards:
        waiting.add_metric([name], view.waiting(name))
        leased.add_metric([name], view.leased(name))
        reward_workers = [worker for worker in view.workers if worker.reward == name]
        states = Counter("ready" if w.ready else "down" if name in view.down else "starting" for w in reward_workers)
        for state in ("ready", "starting", "down"):
            workers.add_metric([name, state], states[state])
        restarts.add_metric([name], sum(worker.restarts for worker in reward_workers))
    yield from (waiting, leased, workers, restarts)


def _of_service(view: View) -> Iterator[Metric]:
    requests = CounterMetricFamily("wfm_reward_requests", "HTTP requests", labels=["endpoint", "code"])
    for (endpoint, code), count in view.requests.items():
        requests.add_metric([endpoint, str(code)], count)
    yield requests
    yield CounterMetricFamily("wfm_pipes_rejected", "Dropped messages", view.hub.rejected)
    yield CounterMetricFamily("wfm_pipes_requeued", "Tasks returned to the queue", view.hub.counts.get("requeued", 0))
    yield CounterMetricFamily("wfm_pipes_duplicates", "Ignored duplicate results", view.hub.counts.get("duplicate", 0))
    yield GaugeMetricFamily("wfm_pipes_held_bytes", "Bytes of queued and running tasks", view.hub.held_bytes)
    yield GaugeMetricFamily("wfm_reward_http_pending_bytes", "Unscored bytes received over HTTP", view.pending_bytes)
    yield GaugeMetricFamily("wfm_reward_uptime_seconds", "Seconds since the service started", view.uptime_s)


def _buckets(times: Times) -> list[tuple[str, float]]:
    """Return the cumulative bucket counts of a Prometheus histogram."""
    counts, total = [], 0
    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], times.counts, strict=True):
        total += count
        counts.append((bound, float(total)))
    return counts


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
