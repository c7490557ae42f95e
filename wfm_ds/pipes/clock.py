"""The time for which a process was running: one that was stopped itself must not call others silent or late."""

from __future__ import annotations

MAX_STEP_S = 2.0  # between two looks of a thread that looks several times a second; more than that it was stopped


class OwnClock:
    """A clock that stands still while its owner does not look at it."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._looked_at_s = now_s

    def look(self, now_s: float) -> float:
        """The owner's time. Called by one thread, several times in MAX_STEP_S; `now_s` may be read by all."""
        self.now_s += min(now_s - self._looked_at_s, MAX_STEP_S)
        self._looked_at_s = now_s
        return self.now_s
