"""GET /: the status page, plain HTML that reloads itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean

from wfm_reward.rewards._vlm import png_data_url
from wfm_reward.stats import RewardStats, ScoredSample, ServiceSnapshot
from wfm_reward.worker_pool import WorkerState

REFRESH_S = 5
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}
h2{font-size:1.1rem;margin:2.2rem 0 .4rem;border-top:1px solid #8886;padding-top:1rem}
p.sub{color:#777;margin:.2rem 0 1rem}
table{border-collapse:collapse;margin:.6rem 0}
th,td{text-align:left;padding:.15rem 1.1rem .15rem 0;vertical-align:top}
th{font-weight:600;color:#777;font-size:.85rem}
td.n{text-align:right;font-variant-numeric:tabular-nums}
td.why{overflow-wrap:anywhere}
.state{font-size:.85rem;padding:.1rem .5rem;border-radius:.7rem;color:#fff;background:#777}
.ready{background:#1a7f37}.degraded{background:#9a6700}.down{background:#cf222e}
.samples{display:flex;gap:1rem;flex-wrap:wrap}
figure{margin:0;width:168px}
img{max-width:160px;display:block;border-radius:4px;image-rendering:auto}
figcaption{font-size:.8rem;overflow-wrap:anywhere}
.bad{color:#cf222e}
"""


def render_status_page(snapshot: ServiceSnapshot) -> str:
    clients = "".join(
        f"<tr><td>{escape(name)}</td><td class=n>{seen_s:.0f} s ago</td></tr>"
        for name, seen_s in sorted(snapshot.broker.clients.items())
    )
    sections = "".join(_reward_section(snapshot, name) for name in snapshot.rewards)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<meta http-equiv=refresh content={REFRESH_S}><meta name=viewport content='width=device-width'>"
        f"<title>wfm_reward</title><style>{STYLE}</style></head><body>"
        f"<h1>Reward service</h1><p class=sub>wfm_ds {escape(snapshot.version)}, up "
        f"{_format_duration(snapshot.uptime_s)}; "
        f"{snapshot.broker.held_bytes / 2**20:.1f} MiB held for tasks; {snapshot.broker.counts.get('requeued', 0)} "
        "tasks requeued, "
        f"{snapshot.broker.rejected} messages dropped; reloads every {REFRESH_S} s; <a href=metrics>metrics</a></p>"
        f"{_overview_table(snapshot)}{sections}"
        f"<h2>Clients</h2><table id=clients><tr><th>client</th><th>last seen</th></tr>{clients}</table>"
        "</body></html>"
    )


def _overview_table(snapshot: ServiceSnapshot) -> str:
    head = ("reward", "state", "waiting", "running", "done/min", "scored", "failed", "mean", "range", "batch", "s/item")
    rows = "".join(
        f"<tr id='row-{escape(name)}'><td>{escape(name)}</td><td>{_state_badge(snapshot.reward_state(name))}</td>"
        + "".join(f"<td class=n>{text}</td>" for text in _overview_numbers(snapshot, name))
        + "</tr>"
        for name in snapshot.rewards
    )
    return f"<table id=rewards><tr>{''.join(f'<th>{text}</th>' for text in head)}</tr>{rows}</table>"


def _overview_numbers(snapshot: ServiceSnapshot, name: str) -> Iterator[str]:
    stats = snapshot.reward_stats(name)
    items = sum(stats.score_s.counts)
    yield str(snapshot.num_waiting(name))
    yield str(snapshot.num_leased(name))
    yield f"{stats.items_per_minute(snapshot.now_s):.0f}"
    yield str(stats.scored)
    yield str(stats.failed.total())
    yield f"{fmean(stats.scores):.4g}" if stats.scores else ""
    yield f"{min(stats.scores):.4g} .. {max(stats.scores):.4g}" if stats.scores else ""
    yield f"{fmean(stats.batch_sizes):.1f}" if stats.batch_sizes else ""
    yield f"{stats.score_s.total / items:.3f}" if items else ""


def _reward_section(snapshot: ServiceSnapshot, name: str) -> str:
    stats = snapshot.reward_stats(name)
    down = f"<p class=bad>{escape(snapshot.down_reasons[name])}</p>" if name in snapshot.down_reasons else ""
    workers = [worker for worker in snapshot.workers if worker.reward == name]
    samples = "".join(_sample_figure(sample) for sample in reversed(stats.samples))
    gallery = f"<div class=samples>{samples}</div>" if samples else ""
    return f"<h2>{escape(name)}</h2>{down}{_worker_table(snapshot, workers)}{_failure_table(snapshot, stats)}{gallery}"


def _worker_table(snapshot: ServiceSnapshot, workers: Sequence[WorkerState]) -> str:
    rows = ""
    for w in workers:
        age_s = snapshot.broker.workers.get(w.worker_id)
        progress = "idle" if age_s is None else f"{age_s:.0f} s ago"
        rows += (
            f"<tr><td>{escape(w.name)}</td><td>{_state_badge('ready' if w.ready else 'starting')}</td>"
            f"<td>{escape(w.device)}</td>"
            f"<td class=n>{w.pid or ''}</td><td class=n>{w.restarts}</td><td class=n>{progress}</td></tr>"
        )
    head = "<tr><th>worker</th><th>state</th><th>device</th><th>pid</th><th>restarts</th><th>last progress</th></tr>"
    return f"<table class=workers>{head}{rows}</table>"


def _failure_table(snapshot: ServiceSnapshot, stats: RewardStats) -> str:
    if not stats.failures:
        return ""
    rows = "".join(
        f"<tr><td class=n>{_format_duration(snapshot.wall_s - failure.at_s)} "
        f"ago</td><td>{escape(failure.sample_id[:80])}</td>"
        f"<td class=why>{escape(failure.reason[:300])}</td></tr>"
        for failure in reversed(stats.failures)
    )
    return f"<table class=failures><tr><th>failed</th><th>sample</th><th>reason</th></tr>{rows}</table>"


def _sample_figure(sample: ScoredSample) -> str:
    value = f"<b>{sample.value:.4g}</b>" if sample.value is not None else "<b class=bad>failed</b>"
    parts = "".join(f"<br>{escape(name)} {part:.4g}" for name, part in sorted(sample.parts.items()))
    at = time.strftime("%H:%M:%S", time.localtime(sample.at_s))
    return (
        f"<figure><img alt='{escape(sample.sample_id[:80])}' src='{png_data_url(sample.image)}'>"
        f"<figcaption>{value} at {at}{parts}<br>{escape(sample.prompt[:120])}</figcaption></figure>"
    )


def _state_badge(state: str) -> str:
    return f"<span class='state {state}'>{state}</span>"


def _format_duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
