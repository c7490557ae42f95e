"""Measurements of a step: statistics of its loss terms, and time and device memory by phase. monitor.py writes them.

Statistics need no host synchronization per micro-batch. On a GPU, a phase is measured by two CUDA events on the current
stream, which are read at the end of the step. The clock of the host would attribute GPU time to a later phase, because
the host only queues work and waits for its result later. If the host waits in a phase, e.g. for data, the GPU is idle
for the time of that phase.
"""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from wfm_ds.distributed.world import World

GIB = 2**30
MEMORY_TAG = "perf/peak_memory_gib"

TimePoint = TypeVar("TimePoint")


class Meter:
    """Weighted statistics of a step over all of its loss terms and all replicas.

    A name that ends in `_std` is a population standard deviation. A name with the word `max` (`x_max`, `x_max_abs_dev`)
    is a maximum. All other statistics are means. Every rank must add the same names in the same order. Statistics with
    total weight 0 are omitted from the result.
    """

    def __init__(self) -> None:
        # On the device. Keys: the names added together. `x_std^2` is the mean square of `x_std`.
        self._sums: dict[tuple[str, ...], Tensor] = {}  # [2, N] float64: weighted values, weights
        self._maxima: dict[tuple[str, ...], Tensor] = {}  # [N]

    def add(self, stats: Mapping[str, Tensor | tuple[Tensor, Tensor]], weight_B: Tensor) -> None:
        """Add the statistics of a micro-batch. weight_B: weights [B] of its loss terms; padding has weight 0.

        stats: {name: values [B], detached}, or {name: (values [B], mask [B])} if only some loss terms have a value.
        """
        means = {name: stat for name, stat in stats.items() if not is_maximum(name)}
        squares = {f"{name}^2": stat for name, stat in means.items() if name.endswith("_std")}
        if means:
            names = (*means, *squares)
            sums = sum_weighted([*means.values(), *squares.values()], len(squares), weight_B)
            self._sums[names] = sums if names not in self._sums else self._sums[names].add_(sums)
        if len(means) < len(stats):
            names = tuple(name for name in stats if name not in means)
            value_NB, weight_NB = stack_stats([stats[name] for name in names], weight_B)
            biggest = torch.where(weight_NB > 0, value_NB, -torch.inf).amax(dim=1)
            self._maxima[names] = torch.maximum(self._maxima.get(names, biggest), biggest)

    def collect(self, world: World) -> dict[str, float]:
        """Return {name: value over all replicas} on every rank, and reset the meter. Collective."""
        tensors = [*self._sums.values(), *self._maxima.values()]
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        maxima: dict[str, float] = {}
        # A single copy to the host for all values.
        numbers = iter(torch.cat([part.flatten().double() for part in tensors]).tolist() if tensors else [])
        for names in self._sums:
            for totals_by_name in (sums, weights):
                totals_by_name |= {name: totals_by_name.get(name, 0.0) + next(numbers) for name in names}
        for names in self._maxima:
            maxima |= {name: max(maxima.get(name, -math.inf), next(numbers)) for name in names}
        totals = world.sum_over_replicas(
            {f"s:{n}": v for n, v in sums.items()} | {f"w:{n}": v for n, v in weights.items()}
        )
        values = {n: totals[f"s:{n}"] / totals[f"w:{n}"] for n in sums if totals[f"w:{n}"] > 0}
        for name in [n for n in values if n.endswith("_std")]:
            values[name] = math.sqrt(max(0.0, values.pop(f"{name}^2") - values[name] ** 2))
        values |= {n: v for n, v in world.max_over_ranks(maxima).items() if v > -torch.inf}
        self.__init__()  # type: ignore[misc]
        return values


def is_maximum(name: str) -> bool:
    return "max" in name.rpartition("/")[2].split("_")


def stack_stats(stats: Sequence[Tensor | tuple[Tensor, Tensor]], weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """Stack N statistics into values [N, B] and weights [N, B]. A masked loss term has weight 0."""
    value_NB = torch.stack([stat[0] if isinstance(stat, tuple) else stat for stat in stats])
    if not any(isinstance(stat, tuple) for stat in stats):
        return value_NB, weight_B.expand_as(value_NB)
    everywhere = torch.ones_like(weight_B)
    mask_NB = torch.stack([stat[1] if isinstance(stat, tuple) else everywhere for stat in stats])
    return value_NB, weight_B * mask_NB


def sum_weighted(stats: Sequence[Tensor | tuple[Tensor, Tensor]], num_squared: int, weight_B: Tensor) -> Tensor:
    """Return the weighted sum and the sum of weights of each of N statistics, [2, N] float64.

    The values of the last `num_squared` statistics are squared first.
    """
    value_NB, weight_NB = stack_stats(stats, weight_B)
    value_NB = value_NB.double()
    if num_squared:
        value_NB[-num_squared:].square_()
    # A product is not enough, because the values of padding may be NaN.
    return torch.stack([torch.where(weight_NB > 0, value_NB * weight_NB, 0), weight_NB.double()]).sum(dim=2)


class Clock(Protocol[TimePoint]):
    """Interface of a clock that records time points and measures the seconds between two of them."""

    def record_time(self) -> TimePoint: ...

    def wait_until_reached(self, mark: TimePoint) -> None:
        """Wait until the device has passed this time point and all earlier ones."""

    def measure_seconds(self, start: TimePoint, end: TimePoint) -> float: ...

    def release(self, marks: Sequence[TimePoint]) -> None:
        """Release time points that are no longer needed."""


class HostClock:
    """The clock of this process, for a device that works synchronously: the CPU."""

    def record_time(self) -> float:
        return time.monotonic()

    def wait_until_reached(self, mark: float) -> None:
        pass

    def measure_seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, marks: Sequence[float]) -> None:
        pass


class EventClock:
    """A clock of CUDA events on the current stream. It reuses the events of the previous step."""

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []

    def record_time(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait_until_reached(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def measure_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def release(self, marks: Sequence[torch.cuda.Event]) -> None:
        self._unused.extend(marks)


class ProcessMemory:
    """Peak resident memory of this process since its start. On a CPU, the peaks of single phases are unknown."""

    def record_peak(self, phases: Sequence[str]) -> None:
        pass

    def pop_metrics(self) -> dict[str, float]:
        return {MEMORY_TAG: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class GpuMemory:
    """Records the peak of allocated memory in each phase, and the peak of reserved memory in the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase_peaks: dict[str, int] = defaultdict(int)
        self._reserved = 0

    def record_peak(self, phases: Sequence[str]) -> None:
        """Record the peak of allocated memory since the last call for each of these phases, which are all active."""
        allocated = torch.cuda.max_memory_allocated(self._device)
        for phase in phases:
            self._phase_peaks[phase] = max(self._phase_peaks[phase], allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def pop_metrics(self) -> dict[str, float]:
        """Return the peaks since the last call, in GiB."""
        self.record_peak(())
        peaks = {f"{MEMORY_TAG}/{phase}": peak / GIB for phase, peak in sorted(self._phase_peaks.items())}
        peaks[MEMORY_TAG] = self._reserved / GIB
        self._phase_peaks.clear()
        self._reserved = 0
        return peaks


class PhaseTimes(Generic[TimePoint]):
    """Time spans of a step's phases, measured by one clock. Phases may repeat and be nested."""

    def __init__(self, clock: Clock[TimePoint]) -> None:
        self._clock, self._step_start = clock, clock.record_time()
        self._spans: list[tuple[str, TimePoint, TimePoint]] = []

    def record_time(self) -> TimePoint:
        return self._clock.record_time()

    def add_span(self, phase: str, start: TimePoint) -> None:
        """Record that this phase lasted from `start` until now."""
        self._spans.append((phase, start, self._clock.record_time()))

    def pop_metrics(self) -> dict[str, float]:
        """Return the seconds of each phase and of the whole step as metrics, and start the next step."""
        now = self._clock.record_time()
        self._clock.wait_until_reached(now)
        seconds: dict[str, float] = defaultdict(float)
        for phase, start, end in self._spans:
            seconds[phase] += self._clock.measure_seconds(start, end)
        step_seconds = self._clock.measure_seconds(self._step_start, now)
        self._reset(now)
        return {f"time/{phase}": s for phase, s in sorted(seconds.items())} | {"time/step": step_seconds}

    def restart(self) -> None:
        self._reset(self._clock.record_time())

    def _reset(self, now: TimePoint) -> None:
        self._clock.release([mark for _, start, end in self._spans for mark in (start, end)])
        self._clock.release([self._step_start])
        self._spans, self._step_start = [], now


class Stopwatch:
    """Time and memory of a run's steps, by phase. Use it only in the thread that computes.

    `with stopwatch("train"):` measures a phase, and `end_step` ends a step.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._times: PhaseTimes[Any] = PhaseTimes(EventClock()) if on_gpu else PhaseTimes(HostClock())
        self._memory: GpuMemory | ProcessMemory = GpuMemory(device) if on_gpu else ProcessMemory()
        self._open_phases: list[str] = []
        self.interrupted_phase: str | None = None
        """The innermost phase in which the last error occurred."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._open_phases:
            self.interrupted_phase = None
        self._memory.record_peak(self._open_phases)
        self._open_phases.append(phase)
        start = self._times.record_time()
        try:
            yield
        except BaseException:  # no further calls to the device: their errors could hide this one
            self.interrupted_phase = self.interrupted_phase or phase
            raise
        else:
            self._times.add_span(phase, start)
            self._memory.record_peak(self._open_phases)
        finally:
            self._open_phases.pop()

    def end_step(self) -> dict[str, float]:
        """Return this rank's `time/...` and `perf/peak_memory_gib...` metrics of the step, and start the next step."""
        return {**self._times.pop_metrics(), **self._memory.pop_metrics()}

    def restart(self) -> None:
        """Discard the measurements since the last step. Call it after work that belongs to no step."""
        self._times.restart()
        self._memory.pop_metrics()
