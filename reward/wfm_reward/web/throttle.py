"""Log lines that a client can cause: one a minute for each kind, however many there are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

PERIOD_S = 60.0


class Throttle(logging.Filter):
    """Let one record of each message format pass per period; the next one says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_at_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on a record, and shorten it: a request that cannot be parsed needs no traceback."""
        kind, now_s = str(record.msg), self._clock()
        if now_s - self._passed_at_s.get(kind, float("-inf")) < PERIOD_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._passed_at_s[kind] = now_s
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            text = f"{text}: {' '.join(str(error).split())[:200]}"
            record.exc_info = None
        if count := self._left_out.pop(kind, 0):
            text += f" ({count} more like it were not logged)"
        record.msg, record.args = text, None
        return True


def throttled_logger(name: str) -> logging.Logger:
    """Return the logger of that name with a throttle of its own."""
    logger = logging.getLogger(name)
    if not any(isinstance(one, Throttle) for one in logger.filters):
        logger.addFilter(Throttle())
    return logger
