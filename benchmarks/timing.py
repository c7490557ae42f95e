"""Microseconds on a GPU: variants interleaved in one process, on data that does not fit into the GPU's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.report import summarize

ROUNDS = 7
MIN_ROUND_MS = 20.0
CACHE_BYTES = 256 * 2**20  # several times any GPU's cache; the input sets are larger together
MAX_SETS = 64
Run = Callable[[int], Any]  # argument: number of the input set


def num_sets(bytes_of_one: int) -> int:
    return max(2, min(MAX_SETS, -(-CACHE_BYTES // bytes_of_one)))


def capture_graph(run: Run, sets: int) -> Callable[[], None]:
    """Return a CUDA graph of one call for each input set."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for k in range(sets):  # compile and allocate before the capture
            run(k)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(sets):
            run(k)
    return graph.replay


def eager_loop(run: Run, sets: int) -> Callable[[], None]:
    def run_all_sets() -> None:
        for k in range(sets):
            run(k)

    return run_all_sets


def time_interleaved(variants: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, dict[str, float]]:
    """Summarize the microseconds of a call of each variant, measured A B A B ...; each run makes `calls` calls.

    The first variant is timed a second time as "again". A difference between variants that is smaller than the
    difference between these two is noise.
    """
    first = next(iter(variants))
    everything = [*variants.items(), ("again", variants[first])]
    repeats = {name: _count_repeats(run) for name, run in everything}
    samples: dict[str, list[float]] = {name: [] for name, _ in everything}
    for _ in range(ROUNDS):
        for name, run in everything:
            samples[name].append(_measure_ms(run, repeats[name]) * 1000 / (repeats[name] * calls))
    return {name: summarize(values) for name, values in samples.items()}


def _count_repeats(run: Callable[[], Any]) -> int:
    run()
    return max(1, round(MIN_ROUND_MS / max(_measure_ms(run, 1), 1e-3)))


def _measure_ms(run: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def copy_gbps() -> float:
    """Return the GB/s that a copy of 1 GiB reads and writes. Percentages refer to this rate."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    time = time_interleaved({"copy": lambda: target.copy_(source)}, 1)["copy"]
    return 2 * source.numel() * 4 / (time["median"] * 1000)
