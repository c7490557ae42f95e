"""Log lines that a client can cause: one a minute for each kind, however many there are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

from wfm_ds.pipes.throttle import Throttle

LONGEST_ERROR = 200  # characters of what cannot be parsed


class RareLines(logging.Filter):
    """Let the records of a logger through a Throttle, whose reasons are their message formats."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: list[str] = []
        self._throttle = Throttle(self._lines.append)

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on a record, and shorten it: a request that cannot be parsed needs no traceback."""
        text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            text = f"{text}: {' '.join(str(error).split())[:LONGEST_ERROR]}"
            record.exc_info = None
        self._lines.clear()
        self._throttle.tell(str(record.msg), text, self._clock())
        record.msg, record.args = "\n".join(self._lines), None
        return bool(self._lines)


def throttled_logger(name: str) -> logging.Logger:
    """Return the logger of that name with a throttle of its own."""
    logger = logging.getLogger(name)
    if not any(isinstance(one, RareLines) for one in logger.filters):
        logger.addFilter(RareLines())
    return logger
