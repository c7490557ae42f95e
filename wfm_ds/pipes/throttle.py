"""Rate-limited logging: at most one line per minute and reason, with the number of suppressed lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
MAX_REASONS = 32  # tracked at once, against peers that cause many different reasons
OTHER = "other reasons"


@dataclass(slots=True)
class _Counted:
    since_s: float  # time of the last line
    count: int = 0  # suppressed since then
    text: str = ""  # the newest suppressed line


class Throttle:
    """Logs the first line of a reason immediately and counts further ones for LOG_INTERVAL_S. Not thread-safe.

    Reasons must be fixed texts; put text from peers into the line.
    """

    def __init__(self, write: Callable[[str], None], every_s: float = EVERY_S, max_reasons: int = MAX_REASONS) -> None:
        """`write` receives each line, e.g. logger.warning."""
        self._write, self._every_s, self._max_reasons = write, every_s, max_reasons
        self._counted: dict[str, _Counted] = {}

    def tell(self, reason: str, text: str, now_s: float) -> None:
        """Write `text`, or count it if the last line of this reason is newer than interval_s."""
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
        """Write the counts older than interval_s. Call it regularly, or they wait for the next `log`."""
        for reason, counted in list(self._counted.items()):
            if now_s - counted.since_s < self._every_s:
                continue
            if counted.count:
                self._report(reason, counted, now_s)
                self._counted[reason] = _Counted(now_s)
            else:
                del self._counted[reason]

    def close(self, now_s: float) -> None:
        """Write all remaining counts."""
        for reason, counted in self._counted.items():
            if counted.count:
                self._report(reason, counted, now_s)
        self._counted.clear()

    def _report(self, reason: str, counted: _Counted, now_s: float) -> None:
        self._write(f"{counted.text} ({reason}: {counted.count} more in {now_s - counted.since_s:.0f} s)")
