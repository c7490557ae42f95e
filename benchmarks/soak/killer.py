"""Faults in a seeded order: a list of (role, signal) is shuffled and used up, repeatedly."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from benchmarks.soak.host import LOST_AFTER_S
from benchmarks.soak.process_tree import ProcessTree
from benchmarks.soak.samples import PER_STEP
from wfm_ds.rollout.rewards import MAX_RESTARTS, RESTARTS_WINDOW_S

Fault = tuple[str, signal.Signals]
FAULTS: list[Fault] = [
    *[("rollout worker", signal.SIGKILL)] * 4,
    *[("reward worker", signal.SIGKILL)] * 4,
    ("rollout worker", signal.SIGTERM),
    ("reward worker", signal.SIGTERM),
    *[("rollout worker", signal.SIGSTOP)] * 2,
    ("reward worker", signal.SIGSTOP),
    ("reward service", signal.SIGSTOP),
]
# The trainer restarts a service only MAX_RESTARTS times within RESTARTS_WINDOW_S.
SERVICE_EVERY_S = RESTARTS_WINDOW_S / MAX_RESTARTS + 10.0
OF_SERVICE = (signal.SIGKILL, signal.SIGTERM)
PAUSE_S = {"rollout worker": 2 * LOST_AFTER_S}  # maximum; longer than the broker's worker timeout
SHORT_PAUSE_S = 4.0


@dataclass
class Killer:
    """Sends signals to the processes of a soak."""

    family: ProcessTree
    draw: random.Random
    wait: Callable[[float], bool]  # waits this many seconds; returns True at the end of the soak
    finished: Callable[[], int]  # samples so far
    sent: Counter[Fault] = field(default_factory=Counter)
    _left: list[Fault] = field(default_factory=list)
    _service_at_s: float = float("-inf")  # time of the last kill
    # Numbers of finished samples at the last faults of rollout workers.
    _before: deque[int] = field(default_factory=lambda: deque(maxlen=2))

    def inject(self, *, spare_service: bool) -> str:
        """Send the next signal to a process, and return a message. A paused process continues before this returns."""
        role, number = self._draw_fault(spare_service)
        if role == "rollout worker" and not self._may_disturb():
            return f"{number.name} not sent to a {role}: a chunk may have lost two workers"
        processes = self.family.alive_processes(role)
        if not processes:
            return f"no {role} is running"
        process = self.draw.choice(processes)
        if role == "rollout worker":
            self._before.append(self.finished())
        try:
            process.send_signal(number)
            self.sent[role, number] += 1
            words = f"{number.name} to {role} {process.pid}"
            return words if number != signal.SIGSTOP else f"{words} for {self._pause_process(role, process):.1f} s"
        except psutil.NoSuchProcess:
            return f"{role} {process.pid} has already exited"

    def _may_disturb(self) -> bool:
        """Return False while a chunk may have lost two workers, because a chunk that loses three is abandoned by
        design.

        All chunks that were admitted at the fault before the last one must be finished: three steps at staleness 1.
        """
        return len(self._before) < 2 or self.finished() >= (self._before[0] // PER_STEP + 3) * PER_STEP

    def _draw_fault(self, spare_service: bool) -> Fault:
        if not spare_service and time.monotonic() - self._service_at_s > SERVICE_EVERY_S:
            self._service_at_s = time.monotonic()
            return "reward service", self.draw.choice(OF_SERVICE)
        if not self._left:
            self._left = self.draw.sample(FAULTS, len(FAULTS))
        return self._left.pop()

    def _pause_process(self, role: str, process: psutil.Process) -> float:
        seconds = self.draw.uniform(0.5, PAUSE_S.get(role, SHORT_PAUSE_S))
        try:
            self.wait(seconds)
        finally:
            process.send_signal(signal.SIGCONT)
        return seconds
