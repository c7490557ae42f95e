"""Time and device memory of a step, by phase.

The host only queues work for a GPU, so with the host's clock the time of one phase would count for a later phase that
waits for it. Therefore phases on a GPU are measured by two events on the current stream. They are read at the end of
the step, which is the only synchronization in this module. A phase in which the host waits but the GPU does not, such
as for data, has the time that the GPU was idle.
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
    """A source of time points, and the seconds between two of them."""

    def mark(self) -> Mark: ...

    def wait(self, mark: Mark) -> None:
        """Wait until the device has passed this time point and all earlier ones."""

    def seconds(self, began: Mark, ended: Mark) -> float: ...

    def free(self, marks: Sequence[Mark]) -> None:
        """Release time points that are no longer needed."""


class HostClock:
    """The time of this process, for a device that works synchronously: the CPU."""

    def mark(self) -> float:
        return time.monotonic()

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, began: float, ended: float) -> float:
        return ended - began

    def free(self, marks: Sequence[float]) -> None:
        pass


class EventClock:
    """CUDA events on the current stream. Events of one step are reused in the next."""

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
    """Peak resident memory of this process since its start: on a CPU there is no peak per phase."""

    def note(self, phases: Sequence[str]) -> None:
        pass

    def take(self) -> dict[str, float]:
        return {MEMORY: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


class GpuMemory:
    """Peak memory allocated for tensors in each phase, and peak reserved memory of the whole step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_phases: dict[str, int] = defaultdict(int)
        self._reserved = 0

    def note(self, phases: Sequence[str]) -> None:
        """Assign the peak since the last call to these phases, which were all active."""
        allocated = torch.cuda.max_memory_allocated(self._device)
        for phase in phases:
            self._of_phases[phase] = max(self._of_phases[phase], allocated)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        self.note(())
        peaks = {f"{MEMORY}/{phase}": peak / GIB for phase, peak in sorted(self._of_phases.items())}
        peaks[MEMORY] = self._reserved / GIB
        self._of_phases.clear()
        self._reserved = 0
        return peaks


class PhaseTimes(Generic[Mark]):
    """Time spans of a step, measured by one clock. A phase may have several spans, and may be nested in another."""

    def __init__(self, clock: Clock[Mark]) -> None:
        self._clock, self._began = clock, clock.mark()
        self._spans: list[tuple[str, Mark, Mark]] = []

    def mark(self) -> Mark:
        return self._clock.mark()

    def add(self, phase: str, began: Mark) -> None:
        """Record a span that ends now."""
        self._spans.append((phase, began, self._clock.mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and of the step, and start the next step."""
        now = self._clock.mark()
        self._clock.wait(now)
        seconds: dict[str, float] = defaultdict(float)
        for phase, start, end in self._spans:
            seconds[phase] += self._clock.seconds(start, end)
        step_seconds = self._clock.seconds(self._began, now)
        self._forget(now)
        return {f"time/{phase}": s for phase, s in sorted(seconds.items())} | {"time/step": step_seconds}

    def restart(self) -> None:
        self._forget(self._clock.mark())

    def _forget(self, now: Mark) -> None:
        self._clock.free([mark for _, start, end in self._spans for mark in (start, end)])
        self._clock.free([self._began])
        self._spans, self._began = [], now


class Stopwatch:
    """Time and memory of the steps of a run: `with timer("train"):` measures a phase, and `end_step` ends a step. Use
    it only in the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        """device: the device that does the work of the phases."""
        on_gpu = device.type == "cuda"
        self._times: PhaseTimes[Any] = PhaseTimes(EventClock()) if on_gpu else PhaseTimes(HostClock())
        self._memory: GpuMemory | ProcessMemory = GpuMemory(device) if on_gpu else ProcessMemory()
        self._under_way: list[str] = []
        self.interrupted: str | None = None
        """The innermost phase in which the last error occurred."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._under_way:
            self.interrupted = None
        self._memory.note(self._under_way)
        self._under_way.append(phase)
        start = self._times.mark()
        try:
            yield
        except BaseException:  # no further calls to the device: their errors could hide this one
            self.interrupted = self.interrupted or phase
            raise
        else:
            self._times.add(phase, start)
            self._memory.note(self._under_way)
        finally:
            self._under_way.pop()

    def lap(self) -> dict[str, float]:
        """Return this rank's metrics of the step, `time/...` and `perf/peak_memory_gib...`. Every rank has the same
        phases."""
        return {**self._times.take(), **self._memory.take()}

    def restart(self) -> None:
        """Discard the measurements since the last step, which do not belong to one."""
        self._times.restart()
        self._memory.take()
