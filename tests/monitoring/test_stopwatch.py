"""Time and memory by phase: on this CPU, and on a simulated GPU with a queue, a clock and a byte counter."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from wfm_ds.monitoring import meters
from wfm_ds.monitoring.meters import Stopwatch

GIB = 2**30
CUDA = torch.device("cuda", 0)


class Gpu:
    """A host that queues work, and a device that executes it in order."""

    def __init__(self):
        self.host_s = self.device_s = 0.0
        self.events, self.waits = [], 0
        self.allocated = self.peak = self.reserved_peak = 0

    def queue(self, seconds):
        self.device_s = max(self.device_s, self.host_s) + seconds

    def host_works(self, seconds):
        self.host_s += seconds

    def needs(self, gib):
        """Allocate memory temporarily."""
        self.peak = max(self.peak, self.allocated + gib * GIB)
        self.reserved_peak = max(self.reserved_peak, self.peak + GIB)

    def reset(self, device):
        self.peak = self.reserved_peak = self.allocated

    def event(self, *, enable_timing):
        assert enable_timing
        gpu = self

        class Event:
            at_s = None

            def record(self):
                gpu.queue(0.0)
                self.at_s = gpu.device_s

            def synchronize(self):
                gpu.waits += 1
                gpu.host_s = max(gpu.host_s, self.at_s)

            def elapsed_time(self, other):
                assert gpu.host_s >= other.at_s, "read before it has happened"
                return 1000 * (other.at_s - self.at_s)

        self.events.append(Event())
        return self.events[-1]


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: gpu.reserved_peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset)
    return gpu


def times(metrics):
    return {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}


def test_on_a_cpu_times_are_host_times_and_memory_is_that_of_the_process(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meters.time, "monotonic", lambda: clock.now)
    timer = Stopwatch(torch.device("cpu"))
    with timer("rollout"):
        clock.now += 2.0
        for _ in range(2):
            with timer("decode"):
                clock.now += 0.5
    clock.now += 1.0
    metrics = timer.end_step()
    assert times(metrics) == {"rollout": 3.0, "decode": 1.0, "step": 4.0}
    assert metrics.keys() - {"time/rollout", "time/decode", "time/step"} == {"perf/peak_memory_gib"}
    assert 0.01 < metrics["perf/peak_memory_gib"] < 1000
    clock.now += 7.0
    timer.restart()
    assert times(timer.end_step()) == {"step": 0.0}


def test_work_counts_for_the_phase_that_queues_it(gpu):
    timer = Stopwatch(CUDA)
    with timer("rollout"):
        gpu.queue(5.0)
        with timer("decode"):
            gpu.queue(2.0)
    with timer("train"):
        gpu.queue(3.0)
    with timer("reward_wait"):
        gpu.host_works(4.0)  # hidden behind the queued work
    assert gpu.waits == 0
    assert times(timer.end_step()) == {"rollout": 7.0, "decode": 2.0, "train": 3.0, "reward_wait": 0.0, "step": 10.0}
    assert gpu.waits == 1
    with timer("data_wait"):
        gpu.host_works(6.0)  # the queue is empty, so the device is idle
    assert times(timer.end_step()) == {"data_wait": 6.0, "step": 6.0}


def test_a_run_reuses_the_events_of_one_step(gpu):
    timer = Stopwatch(CUDA)
    counts = []
    for _ in range(5):
        for phase in ("rollout", "train", "train"):
            with timer(phase):
                gpu.queue(1.0)
        assert times(timer.end_step()) == {"rollout": 1.0, "train": 2.0, "step": 3.0}
        counts.append(len(gpu.events))
    assert counts == [8] * 5  # two per span, and both ends of the step


def test_phases_before_the_first_step_are_discarded_with_their_events(gpu):
    timer = Stopwatch(CUDA)
    with timer("validation"):
        gpu.queue(9.0)
        gpu.needs(50)
    timer.restart()
    with timer("train"):
        gpu.queue(1.0)
    metrics = timer.end_step()
    assert times(metrics) == {"train": 1.0, "step": 1.0}
    assert "perf/peak_memory_gib/validation" not in metrics
    assert metrics["perf/peak_memory_gib"] == 0.0
    assert len(gpu.events) <= 6


def test_the_peak_of_a_phase_includes_nested_phases(gpu):
    timer = Stopwatch(CUDA)
    gpu.allocated = 2 * GIB
    with timer("rollout"):
        gpu.needs(3)
        with timer("decode"):
            gpu.needs(10)
        gpu.needs(1)
    gpu.needs(20)  # outside of any phase: counts only for the step
    with timer("train"):
        gpu.needs(6)
    with timer("optimizer"):
        pass
    metrics = timer.end_step()
    peaks = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("perf/")}
    assert peaks == {"rollout": 12.0, "decode": 12.0, "train": 8.0, "optimizer": 2.0, "peak_memory_gib": 23.0}


def test_after_an_error_the_innermost_phase_and_its_peak_are_known(gpu):
    timer = Stopwatch(CUDA)
    num_events = []

    def fail():
        with timer("rollout"), timer("decode"):
            gpu.needs(30)
            num_events.append(len(gpu.events))
            raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        fail()
    assert timer.interrupted_phase == "decode"
    assert gpu.peak == 30 * GIB
    assert len(gpu.events) == num_events[0]  # after a device error every further call fails too
    with timer("train"):
        assert timer.interrupted_phase is None
