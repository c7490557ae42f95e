"""Microseconds on a GPU: peers side by side in one process, interleaved, on data that does not fit into its cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROUNDS = 7
MIN_ROUND_MS = 20.0
CACHE_BYTES = 256 * 2**20  # several times the cache of any GPU so far: inputs rotate through more than this
MAX_SETS = 64
Run = Callable[[int], Any]  # of input set number k


@dataclass(frozen=True)
class Time:
    """Microseconds of one call, over the rounds."""

    median: float
    min: float
    max: float
    n: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def num_sets(bytes_of_one: int) -> int:
    return max(2, min(MAX_SETS, -(-CACHE_BYTES // bytes_of_one)))


def captured(run: Run, sets: int) -> Callable[[], None]:
    """A CUDA graph of one call for each input set."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for k in range(sets):  # compiles and allocates before the capture
            run(k)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(sets):
            run(k)
    return graph.replay


def eager(run: Run, sets: int) -> Callable[[], None]:
    def once() -> None:
        for k in range(sets):
            run(k)

    return once


def interleaved(variants: Mapping[str, Callable[[], None]], calls: int) -> dict[str, Time]:
    """Microseconds a call of each variant, A B A B ...; every variant does `calls` calls at once.

    The first variant is timed twice, under the name "again": a smaller difference than between these is none.
    """
    first = next(iter(variants))
    everything = [*variants.items(), ("again", variants[first])]
    repeats = {name: _repeats(run) for name, run in everything}
    samples: dict[str, list[float]] = {name: [] for name, _ in everything}
    for _ in range(ROUNDS):
        for name, run in everything:
            samples[name].append(_elapsed_ms(run, repeats[name]) * 1000 / (repeats[name] * calls))
    return {name: _time(values) for name, values in samples.items()}


def _time(values: Sequence[float]) -> Time:
    return Time(statistics.median(values), min(values), max(values), len(values))


def _repeats(run: Callable[[], None]) -> int:
    run()
    return max(1, round(MIN_ROUND_MS / max(_elapsed_ms(run, 1), 1e-3)))


def _elapsed_ms(run: Callable[[], None], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def copy_gbps() -> float:
    """Bytes read and written per nanosecond by a copy of 1 GiB: the ceiling that percentages refer to."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    time = interleaved({"copy": copy}, 1)["copy"]
    return 2 * source.numel() * 4 / (time.median * 1000)
