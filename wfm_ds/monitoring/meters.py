"""Measurements of a step: statistics of its loss terms, and the time and memory of each phase."""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wfm_ds.distributed.world import World

GIB = 2**30
MEMORY_TAG = "perf/peak_memory_gib"


class Meter:
    """Weighted statistics of a step over the loss terms of all replicas.

    A statistic is a population standard deviation if its name ends in `_std`, a maximum if its name contains the word
    `max` (`x_max`, `x_max_abs_dev`), and a mean otherwise. Every rank must add the same names in the same order.
    Statistics with total weight 0 are omitted.
    """

    def __init__(self) -> None:
        # Tensors on the device. The keys are the names of one call of `add`. `x_std^2` is the mean square of `x_std`.
        self._sums: dict[tuple[str, ...], Tensor] = {}  # [2, number of names] float64: weighted values, weights
        self._maxima: dict[tuple[str, ...], Tensor] = {}  # [number of names]

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
        """Return {name: value over all replicas} on every rank, and reset the meter. All ranks must call this."""
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
    """Stack N statistics of B loss terms. Returns values [N, B] and weights [N, B].

    stats: for each statistic, its values [B] or (values, mask [B]). The weights are weight_B or weight_B * mask.
    """
    value_NB = torch.stack([stat[0] if isinstance(stat, tuple) else stat for stat in stats])
    if not any(isinstance(stat, tuple) for stat in stats):
        return value_NB, weight_B.expand_as(value_NB)
    everywhere = torch.ones_like(weight_B)
    mask_NB = torch.stack([stat[1] if isinstance(stat, tuple) else everywhere for stat in stats])
    return value_NB, weight_B * mask_NB


def sum_weighted(stats: Sequence[Tensor | tuple[Tensor, Tensor]], num_squared: int, weight_B: Tensor) -> Tensor:
    """Return weighted sums of N statistics (the last `num_squared` squared) and of their weights: [2, N] float64."""
    value_NB, weight_NB = stack_stats(stats, weight_B)
    value_NB = value_NB.double()
    if num_squared:
        value_NB[-num_squared:].square_()
    # A product is not enough, because the values of padding may be NaN.
    return torch.stack([torch.where(weight_NB > 0, value_NB * weight_NB, 0), weight_NB.double()]).sum(dim=2)


class HostClock:
    """Clock for runs on the CPU, where each operation is complete when its call returns."""

    def record_time(self) -> Any:
        return time.monotonic()

    def wait_until_reached(self, mark: Any) -> None:
        """Wait until the device has done the work that was queued before this time point."""

    def measure_seconds(self, start: Any, end: Any) -> float:
        return float(end - start)

    def release(self, marks: Sequence[Any]) -> None:
        """Release time points that are no longer needed."""


class EventClock(HostClock):
    """A clock of CUDA events on the current stream."""

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
    """Peak resident memory of this process since its start, for runs on the CPU."""

    def record_peak(self, phases: Sequence[str]) -> None:
        pass

    def pop_metrics(self) -> dict[str, float]:
        return {MEMORY_TAG: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class GpuMemory(ProcessMemory):
    """Records the peak of allocated memory in each phase, and the peak of reserved memory in the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase_peaks: dict[str, int] = defaultdict(int)
        self._reserved = 0

    def record_peak(self, phases: Sequence[str]) -> None:
        """Record the peak of allocated memory since the last call. phases: the phases that are active now."""
        allocated = torch.cuda.max_memory_allocated(self._device)
        for phase in phases:
            self._phase_peaks[phase] = max(self._phase_peaks[phase], allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def pop_metrics(self) -> dict[str, float]:
        """Return the memory peaks since the last call, in GiB."""
        self.record_peak(())
        peaks = {f"{MEMORY_TAG}/{phase}": peak / GIB for phase, peak in sorted(self._phase_peaks.items())}
        peaks[MEMORY_TAG] = self._reserved / GIB
        self._phase_peaks.clear()
        self._reserved = 0
        return peaks


class Stopwatch:
    """Time and memory of a run's steps, by phase. Phases may repeat and be nested.

    `with stopwatch("train"):` measures a phase, and `end_step` ends a step. Use it only in the thread that computes.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._clock = EventClock() if on_gpu else HostClock()
        self._memory = GpuMemory(device) if on_gpu else ProcessMemory()
        self._step_start = self._clock.record_time()
        self._spans: list[tuple[str, Any, Any]] = []  # phase, start, end
        self._open_phases: list[str] = []
        self.interrupted_phase: str | None = None
        """The innermost phase in which the last error occurred."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._open_phases:
            self.interrupted_phase = None
        self._memory.record_peak(self._open_phases)
        self._open_phases.append(phase)
        start = self._clock.record_time()
        try:
            yield
        except BaseException:  # no further calls to the device: their errors could hide this one
            self.interrupted_phase = self.interrupted_phase or phase
            raise
        else:
            self._spans.append((phase, start, self._clock.record_time()))
            self._memory.record_peak(self._open_phases)
        finally:
            self._open_phases.pop()

    def end_step(self) -> dict[str, float]:
        """Return this rank's `time/...` and `perf/peak_memory_gib...` metrics of the step, and start the next step."""
        now = self._clock.record_time()
        self._clock.wait_until_reached(now)
        seconds: dict[str, float] = defaultdict(float)
        for phase, start, end in self._spans:
            seconds[phase] += self._clock.measure_seconds(start, end)
        step_seconds = self._clock.measure_seconds(self._step_start, now)
        self._start_step(now)
        times = {f"time/{phase}": s for phase, s in sorted(seconds.items())} | {"time/step": step_seconds}
        return times | self._memory.pop_metrics()

    def restart(self) -> None:
        """Discard the measurements since the last step. Call it after work that is not part of a step."""
        self._start_step(self._clock.record_time())
        self._memory.pop_metrics()

    def _start_step(self, now: Any) -> None:
        self._clock.release([self._step_start, *(mark for _, *marks in self._spans for mark in marks)])
        self._spans, self._step_start = [], now
