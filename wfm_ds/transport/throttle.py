"""Limits how often the log repeats a message that other processes can cause, for example with invalid data."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_INTERVAL_S = 60.0


class RepeatFilter(logging.Filter):
    """Passes one record per message format every LOG_INTERVAL_S seconds, with the number of suppressed records."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[str, tuple[float, int]] = {}  # message format -> (time of the last line, suppressed since)

    def filter(self, record: logging.LogRecord) -> bool:
        message_format, now_s = str(record.msg), self._clock()
        last_s, suppressed = self._passed.get(message_format, (float("-inf"), 0))
        if now_s - last_s < LOG_INTERVAL_S:
            self._passed[message_format] = last_s, suppressed + 1
            return False
        self._passed[message_format] = now_s, 0
        if suppressed:
            record.msg = f"{record.getMessage()} ({suppressed} more in the last {now_s - last_s:.0f} s)"
            record.args = None
        return True


def get_throttled_logger(name: str) -> logging.Logger:
    """Return the logger `name` with a RepeatFilter. The limit is per message format, so formats must be constants."""
    logger = logging.getLogger(name)
    if not any(isinstance(known, RepeatFilter) for known in logger.filters):
        logger.addFilter(RepeatFilter())
    return logger
