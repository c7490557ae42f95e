"""Rate limit for log messages that clients can cause: one per minute and kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

from wfm_ds.transport.throttle import LogThrottle

MAX_ERROR_CHARS = 200  # maximum length of the error for a request that cannot be parsed


class ThrottleFilter(logging.Filter):
    """Logging filter that passes records through a Throttle, keyed by their message format."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: list[str] = []
        self._throttle = LogThrottle(self._lines.append)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record.

        Replaces the traceback of a request that cannot be parsed by a short message.
        """
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            text = f"{text}: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}"
            record.exc_info = None
        self._lines.clear()
        self._throttle.log(str(record.msg), text, self._clock())
        record.msg, record.args = "\n".join(self._lines), None
        return bool(self._lines)


def get_throttled_logger(name: str) -> logging.Logger:
    """Return the logger of this name, with a rate limit."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, ThrottleFilter) for f in logger.filters):
        logger.addFilter(ThrottleFilter())
    return logger
