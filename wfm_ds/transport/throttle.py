"""Rate-limited logging: at most one line per minute and reason, with the number of suppressed lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOG_INTERVAL_S = 60.0
MAX_REASONS = 32  # tracked at once; limits memory if peers cause many different reasons
OTHER_REASONS = "other reasons"


@dataclass(slots=True)
class _ReasonCount:
    last_line_s: float  # time of the last line
    count: int = 0  # suppressed since then
    text: str = ""  # the newest suppressed line


class LogThrottle:
    """Logs the first line of each reason immediately, and only counts further lines for LOG_INTERVAL_S.

    Not thread-safe.

    Reasons must be fixed texts. Text received from peers belongs in the line.
    """

    def __init__(
        self, write: Callable[[str], None], interval_s: float = LOG_INTERVAL_S, max_reasons: int = MAX_REASONS
    ) -> None:
        """Create a throttle. write: function that logs a line, such as logger.warning."""
        self._write, self._interval_s, self._max_reasons = write, interval_s, max_reasons
        self._counts: dict[str, _ReasonCount] = {}

    def log(self, reason: str, text: str, now_s: float) -> None:
        """Write `text`, or only count it if a line with this reason was written in the last `interval_s` seconds."""
        self.flush_due(now_s)
        if reason not in self._counts and len(self._counts) >= self._max_reasons:
            reason = OTHER_REASONS
        counted = self._counts.get(reason)
        if counted is None:
            self._counts[reason] = _ReasonCount(now_s)
            self._write(text)
        else:
            counted.count, counted.text = counted.count + 1, text

    def flush_due(self, now_s: float) -> None:
        """Write the counts that are older than `interval_s`.

        Call it regularly; otherwise they are only written at the next call of `log`.
        """
        for reason, counted in list(self._counts.items()):
            if now_s - counted.last_line_s < self._interval_s:
                continue
            if counted.count:
                self._write_count(reason, counted, now_s)
                self._counts[reason] = _ReasonCount(now_s)
            else:
                del self._counts[reason]

    def close(self, now_s: float) -> None:
        """Write all remaining counts."""
        for reason, counted in self._counts.items():
            if counted.count:
                self._write_count(reason, counted, now_s)
        self._counts.clear()

    def _write_count(self, reason: str, counted: _ReasonCount, now_s: float) -> None:
        self._write(f"{counted.text} ({reason}: {counted.count} more in {now_s - counted.last_line_s:.0f} s)")
