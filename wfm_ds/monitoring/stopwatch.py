"""Seconds and device memory of a step, by phase.

The host only queues what a GPU does, so by the host's clock the work of one phase would count for whichever later one
waits for it. There a phase lies between two events on the current stream, which the device stamps when it comes to
them; they are read once a step, by the only wait in here. A phase in which the host waits and the device does not, as
for data, has the seconds that the device stood idle.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

GIB = 2**30
MEMORY = "perf/peak_memory_gib"

Mark = TypeVar("Mark")


class Clock(Protocol[Mark]):
    """Marks in time, and the seconds between two of them."""

    def mark(self) -> Mark: ...

    def wait(self, mark: Mark) -> None:
        """Return once it and all earlier ones can be read."""

    def seconds(self, began: Mark, ended: Mark) -> float: ...

    def free(self, marks: Sequence[Mark]) -> None:
        """Take back marks that nobody will read again."""


class HostClock:
    """The time of this process, for a device that works while the caller waits: the CPU."""

    def mark(self) -> float:
        return time.monotonic()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def free(self, marks: Sequence[float]) -> None:
        pass


class EventClock:
    """CUDA events on the current stream, as many as one step needs and used again in the next."""

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1000

    def free(self, marks: Sequence[torch.cuda.Event]) -> None:
        self._unused.extend(marks)


class ProcessMemory:
    """The largest resident size of this process since it began: no CPU says it for a phase."""

    def note(self, phases: Sequence[str]) -> None:
        pass

    def take(self) -> dict[str, float]:
        return {MEMORY: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class GpuMemory:
    """The most that tensors took in each phase, and that was reserved for them in the whole step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_phases: dict[str, int] = defaultdict(int)
        self._reserved = 0

    def note(self, phases: Sequence[str]) -> None:
        """Count the peak since the last call for these phases, which were all under way."""
        allocated = torch.cuda.max_memory_allocated(self._device)
        for phase in phases:
            self._of_phases[phase] = max(self._of_phases[phase], allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self) -> dict[str, float]:
        """The metrics since the last call."""
        self.note(())
        peaks = {f"{MEMORY}/{phase}": peak / GIB for phase, peak in sorted(self._of_phases.items())}
        peaks[MEMORY] = self._reserved / GIB
        self._of_phases.clear()
        self._reserved = 0
        return peaks


class PhaseTimes(Generic[Mark]):
    """Spans of a step by one clock; one phase may have several, and lie within another."""

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock, self._began = clock, clock.mark()
        self._spans: list[tuple[str, Mark, Mark]] = []

    def mark(self) -> Mark:
        return self._clock.mark()

    def add(self, phase: str, began: Mark) -> None:
        """Record a span that ends now."""
        self._spans.append((phase, began, self._clock.mark()))

    def take(self) -> dict[str, float]:
        """The seconds of each phase, and of the step; the next one begins."""
        now = self._clock.mark()
        self._clock.wait(now)
        seconds: dict[str, float] = defaultdict(float)
        for phase, began, ended in self._spans:
            seconds[phase] += self._clock.seconds(began, ended)
        whole = self._clock.seconds(self._began, now)
        self._forget(now)
        return {f"time/{phase}": s for phase, s in sorted(seconds.items())} | {"time/step": whole}

    def restart(self) -> None:
        self._forget(self._clock.mark())

    def _forget(self, now: Mark) -> None:
        self._clock.free([mark for _, began, ended in self._spans for mark in (began, ended)])
        self._clock.free([self._began])
        self._spans, self._began = [], now


class Stopwatch:
    """Times and memory of the steps of a run: `with timer("train"):` is a phase, and `lap` ends a step.

    Used by the thread that computes alone.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the phases' work is there."""
        on_gpu = device.type == "cuda"
        self._times: PhaseTimes[Any] = PhaseTimes(EventClock()) if on_gpu else PhaseTimes(HostClock())
        self._memory: GpuMemory | ProcessMemory = GpuMemory(device) if on_gpu else ProcessMemory()
        self._under_way: list[str] = []
        self.interrupted: str | None = None
        """The innermost phase that the last error left."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._under_way:
            self.interrupted = None
        self._memory.note(self._under_way)
        self._under_way.append(phase)
        began = self._times.mark()
        try:
            yield
        except BaseException:  # the device is asked nothing more: what it says may hide the error
            self.interrupted = self.interrupted or phase
            raise
        else:
            self._times.add(phase, began)
            self._memory.note(self._under_way)
        finally:
            self._under_way.pop()

    def lap(self) -> dict[str, float]:
        """Metrics of the step that ends, `time/...` and `perf/peak_memory_gib...`, of this rank; every rank has had the
        same phases."""
        return {**self._times.take(), **self._memory.take()}

    def restart(self) -> None:
        """Forget what was measured so far: it belongs to no step."""
        self._times.restart()
        self._memory.take()
