"""GET /metrics: Prometheus metrics of the service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wfm_reward.stats import BUCKETS_S, ServiceSnapshot, TimeHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(snapshot: ServiceSnapshot) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: ServiceSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from _reward_metrics(self._snapshot)
        yield from _worker_metrics(self._snapshot)
        yield from _service_metrics(self._snapshot)


def _reward_metrics(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    items = CounterMetricFamily("wfm_reward_items", "Scored and failed items", labels=["reward", "outcome"])
    failures = CounterMetricFamily("wfm_reward_failures", "Failed items by failure class", labels=["reward", "reason"])
    score_s = HistogramMetricFamily("wfm_reward_score_seconds", "Seconds to score an item", labels=["reward"])
    wait_s = HistogramMetricFamily("wfm_reward_wait_seconds", "Seconds until scoring starts", labels=["reward"])
    all_stats = {name: snapshot.reward_stats(name) for name in snapshot.rewards}
    for name, stats in all_stats.items():
        items.add_metric([name, "scored"], stats.scored)
        items.add_metric([name, "failed"], stats.failed.total())
        for reason, count in stats.failed.items():
            failures.add_metric([name, reason], count)
        score_s.add_metric([name], _cumulative_buckets(stats.score_s), stats.score_s.total)
        wait_s.add_metric([name], _cumulative_buckets(stats.wait_s), stats.wait_s.total)
    yield from (items, failures, score_s, wait_s)
    batches = {name: fmean(stats.batch_sizes) for name, stats in all_stats.items() if stats.batch_sizes}
    means = {name: fmean(stats.scores) for name, stats in all_stats.items() if stats.scores}
    rates = {name: stats.items_per_minute(snapshot.now_s) for name, stats in all_stats.items()}
    yield _reward_gauge("wfm_reward_batch_items", "Mean size of recent batches", batches)
    yield _reward_gauge("wfm_reward_score_mean", "Mean of the last 1000 scores", means)
    yield _reward_gauge("wfm_reward_items_per_minute", "Items finished in the last minute", rates)


def _worker_metrics(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    names = snapshot.rewards
    workers = GaugeMetricFamily("wfm_reward_workers", "Worker processes", labels=["reward", "state"])
    restarts = CounterMetricFamily("wfm_reward_worker_restarts", "Worker restarts", labels=["reward"])
    for name in names:
        reward_workers = [worker for worker in snapshot.workers if worker.reward == name]
        not_ready = "down" if name in snapshot.down_reasons else "starting"
        states = Counter("ready" if worker.ready else not_ready for worker in reward_workers)
        for state in ("ready", "starting", "down"):
            workers.add_metric([name, state], states[state])
        restarts.add_metric([name], sum(worker.restarts for worker in reward_workers))
    yield _reward_gauge("wfm_reward_waiting", "Queued tasks", {name: snapshot.num_waiting(name) for name in names})
    yield _reward_gauge("wfm_reward_leased", "Running tasks", {name: snapshot.num_leased(name) for name in names})
    yield from (workers, restarts)


def _service_metrics(snapshot: ServiceSnapshot) -> Iterator[Metric]:
    requests = CounterMetricFamily("wfm_reward_requests", "HTTP requests", labels=["endpoint", "code"])
    for (endpoint, code), count in snapshot.requests.items():
        requests.add_metric([endpoint, str(code)], count)
    yield requests
    broker = snapshot.broker
    for name, text, value in (
        ("wfm_pipes_rejected", "Dropped messages", broker.rejected),
        ("wfm_pipes_requeued", "Tasks returned to the queue", broker.counts.get("requeued", 0)),
        ("wfm_pipes_duplicates", "Ignored duplicate results", broker.counts.get("duplicate", 0)),
    ):
        yield CounterMetricFamily(name, text, value)
    for name, text, number in (
        ("wfm_pipes_held_bytes", "Bytes of queued and running tasks", broker.held_bytes),
        ("wfm_reward_http_pending_bytes", "Unscored bytes received over HTTP", snapshot.pending_bytes),
        ("wfm_reward_uptime_seconds", "Seconds since the service started", snapshot.uptime_s),
    ):
        yield GaugeMetricFamily(name, text, number)


def _reward_gauge(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=["reward"])
    for reward, value in values.items():
        gauge.add_metric([reward], value)
    return gauge


def _cumulative_buckets(times: TimeHistogram) -> list[tuple[str, float]]:
    counts, total = [], 0
    for bound, count in zip([*map(str, BUCKETS_S), "+Inf"], times.counts, strict=True):
        total += count
        counts.append((bound, float(total)))
    return counts
