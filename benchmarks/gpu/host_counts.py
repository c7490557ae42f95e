"""Host operations of a step: kernel launches, and code positions that wait for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from wfm_ds.monitoring.meters import GIB

LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
GRAPHS = {"cudaGraphLaunch"}
COPIES = {"cudaMemcpyAsync", "cudaMemcpy"}
SYNC_MESSAGE = "called a synchronizing CUDA operation"


def count_launches(run: Callable[[], object]) -> dict[str, int]:
    """Count calls of the CUDA runtime in `run` with torch's profiler. On a CPU count operators instead."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    return summarize_calls({event.key: event.count for event in profile.key_averages()}, on_cuda=on_cuda)


def summarize_calls(calls: dict[str, int], *, on_cuda: bool) -> dict[str, int]:
    """Return the counts of a table from the numbers of calls by name."""
    if not on_cuda:
        return {"operators": sum(count for name, count in calls.items() if name.startswith("aten::"))}
    kinds = {"kernel launches": LAUNCHES, "graph launches": GRAPHS, "copies": COPIES}
    return {kind: sum(calls.get(name, 0) for name in names) for kind, names in kinds.items()}


@contextlib.contextmanager
def count_host_syncs() -> Iterator[Counter[str]]:
    """Count the operations in the block that wait for the device, by `file:line`. Always empty on a CPU."""
    places: Counter[str] = Counter()
    if not torch.cuda.is_available():
        yield places
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if SYNC_MESSAGE in str(warning.message):
            places[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def format_busiest(places: Counter[str], most: int = 5) -> str:
    return ", ".join(f"{place} {count}" for place, count in places.most_common(most))


def memory_columns(device: torch.device) -> dict[str, Any]:
    """Return the peak GiB of the device's tensors and of its allocator; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated GiB": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved GiB": torch.cuda.max_memory_reserved(device) / GIB,
    }
