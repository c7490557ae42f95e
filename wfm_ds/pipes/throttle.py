"""One log line a minute for each reason, however often it is met, with the number of those that had no line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
MAX_REASONS = 32  # at once; a peer that invents reasons gets no line for each
OTHER = "other reasons"


@dataclass(slots=True)
class _Counted:
    since_s: float  # the last line
    count: int = 0  # without a line
    text: str = ""  # of the newest of them


class Throttle:
    """Lines by reason: the first at once, a count when EVERY_S have passed since. For one thread, which gives the time.

    A reason is a fixed text of ours. What a peer wrote belongs into the text of the line.
    """

    def __init__(self, write: Callable[[str], None], every_s: float = EVERY_S, max_reasons: int = MAX_REASONS) -> None:
        """`write` is given each line, such as a logger's `warning`."""
        self._write, self._every_s, self._max_reasons = write, every_s, max_reasons
        self._counted: dict[str, _Counted] = {}

    def tell(self, reason: str, text: str, now_s: float) -> None:
        """Write `text`, or count it if this reason had a line less than `every_s` ago."""
        self.look(now_s)
        if reason not in self._counted and len(self._counted) >= self._max_reasons:
            reason = OTHER
        counted = self._counted.get(reason)
        if counted is None:
            self._counted[reason] = _Counted(now_s)
            self._write(text)
        else:
            counted.count, counted.text = counted.count + 1, text

    def look(self, now_s: float) -> None:
        """Write the counts that are due. Call it from time to time: else they wait for the next `tell`."""
        for reason, counted in list(self._counted.items()):
            if now_s - counted.since_s < self._every_s:
                continue
            if counted.count:
                self._report(reason, counted, now_s)
                self._counted[reason] = _Counted(now_s)
            else:
                del self._counted[reason]

    def close(self, now_s: float) -> None:
        """Write all counts: nobody will call `look` any more."""
        for reason, counted in self._counted.items():
            if counted.count:
                self._report(reason, counted, now_s)
        self._counted.clear()

    def _report(self, reason: str, counted: _Counted, now_s: float) -> None:
        self._write(f"{counted.text} ({reason}: {counted.count} more in {now_s - counted.since_s:.0f} s)")
