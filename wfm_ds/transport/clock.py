"""A clock that excludes the time for which this process was suspended.

With an ordinary clock, a process that resumes would report all peers as silent or late.
"""

from __future__ import annotations

MAX_STEP_S = 2.0  # the owner ticks several times a second; a longer step means that it was suspended


class ActiveClock:
    """A clock that advances by at most MAX_STEP_S per call of `tick`."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._last_tick_s = now_s

    def tick(self, now_s: float) -> float:
        """Advance the clock and return its time.

        A single thread must call this method several times in every MAX_STEP_S seconds. Any thread may read `now_s`.
        """
        self.now_s += min(now_s - self._last_tick_s, MAX_STEP_S)
        self._last_tick_s = now_s
        return self.now_s
