"""Who is hit when, drawn by a seed: a deck of blows is shuffled and dealt, again and again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from benchmarks.soak.family import Family
from benchmarks.soak.host import LOST_AFTER_S
from benchmarks.soak.samples import PER_STEP
from wfm_ds.rollout.rewards import MAX_RESTARTS, RESTARTS_WINDOW_S

Blow = tuple[str, signal.Signals]
DECK: list[Blow] = [
    *[("rollout worker", signal.SIGKILL)] * 4,
    *[("reward worker", signal.SIGKILL)] * 4,
    ("rollout worker", signal.SIGTERM),
    ("reward worker", signal.SIGTERM),
    *[("rollout worker", signal.SIGSTOP)] * 2,
    ("reward worker", signal.SIGSTOP),
    ("reward service", signal.SIGSTOP),
]
# The trainer starts a service again that died so often within so long, and no more.
SERVICE_EVERY_S = RESTARTS_WINDOW_S / MAX_RESTARTS + 10.0
OF_SERVICE = (signal.SIGKILL, signal.SIGTERM)
PAUSE_S = {"rollout worker": 2 * LOST_AFTER_S}  # at most; longer than the hub waits for it
SHORT_PAUSE_S = 4.0


@dataclass
class Killer:
    family: Family
    draw: random.Random
    wait: Callable[[float], bool]  # so many seconds, or until all is over: whether it is
    finished: Callable[[], int]  # samples so far
    struck: Counter[Blow] = field(default_factory=Counter)
    _deck: list[Blow] = field(default_factory=list)
    _service_at_s: float = float("-inf")  # when it was killed last
    _before: deque[int] = field(default_factory=lambda: deque(maxlen=2))  # samples at the last blows to rollout workers

    def strike(self, *, spare_service: bool) -> str:
        """Hit somebody; one that is stopped goes on before this returns. What was done, in words."""
        role, number = self._drawn(spare_service)
        if role == "rollout worker" and not self._may_hit():
            return f"{number.name} to no {role}: a chunk may have lost two"
        victims = self.family.members(role)
        if not victims:
            return f"no {role} to hit"
        victim = self.draw.choice(victims)
        if role == "rollout worker":
            self._before.append(self.finished())
        try:
            victim.send_signal(number)
            self.struck[role, number] += 1
            words = f"{number.name} to {role} {victim.pid}"
            return words if number != signal.SIGSTOP else f"{words} for {self._pause(role, victim):.1f} s"
        except psutil.NoSuchProcess:
            return f"{role} {victim.pid} has ended by itself"

    def _may_hit(self) -> bool:
        """A chunk that loses three workers is given up, on purpose. So all that were admitted at the last blow but one
        must have been finished: at staleness 1, those of three steps."""
        return len(self._before) < 2 or self.finished() >= (self._before[0] // PER_STEP + 3) * PER_STEP

    def _drawn(self, spare_service: bool) -> Blow:
        if not spare_service and time.monotonic() - self._service_at_s > SERVICE_EVERY_S:
            self._service_at_s = time.monotonic()
            return "reward service", self.draw.choice(OF_SERVICE)
        if not self._deck:
            self._deck = self.draw.sample(DECK, len(DECK))
        return self._deck.pop()

    def _pause(self, role: str, victim: psutil.Process) -> float:
        seconds = self.draw.uniform(0.5, PAUSE_S.get(role, SHORT_PAUSE_S))
        try:
            self.wait(seconds)
        finally:
            victim.send_signal(signal.SIGCONT)
        return seconds
