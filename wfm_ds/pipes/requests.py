"""A client's open payload requests, with detection of lost requests that must be repeated.

A timeout cannot detect a lost request: the transfer time depends on payload size and network, and a needless repeat
delays other requests. Message order can, because the broker replies in order on one connection. Requests are followed
by *markers*, small messages that always get a reply. If a later marker has a reply and a request does not, the request
or its reply was lost. A marker is a `release` of a nonexistent id.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MARK_S = 5.0  # between markers
MAX_OPEN = 4  # concurrent requests

Send = Callable[[str, Mapping[str, Any]], bool]


@dataclass(slots=True)
class Request:
    """A message with a `payload` or `missing` reply."""

    type: str
    fields: Mapping[str, Any]
    mark: int | None = None  # first marker sent after it; None: to be (re)sent


class Requests:
    """Requests without a reply, in order of creation. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """`name`: prefix of this client's marker ids; no task id starts with it."""
        self._prefix = f"{name}/"
        self._open: dict[str, Request] = {}  # by the id of the expected payload
        self._mark = 0  # number of the next marker
        self._marked_at_s = float("-inf")

    def add(self, requests: Mapping[str, Request]) -> None:
        self._open.update(requests)

    def close(self, key: str) -> bool:
        """Remove an answered or cancelled request. Returns True if it was open."""
        return self._open.pop(key, None) is not None

    def send(self, now_s: float, send: Send) -> None:
        """Send unsent requests and due markers by `send(type, fields)`, which returns False if nothing was sent."""
        for request in itertools.islice(self._open.values(), MAX_OPEN):
            if request.mark is None and send(request.type, request.fields):
                request.mark = self._mark
        marker = {"ids": [f"{self._prefix}{self._mark}"]}
        if self._open and now_s - self._marked_at_s > MARK_S and send("release", marker):
            self._mark, self._marked_at_s = self._mark + 1, now_s

    def released(self, ids: Iterable[str]) -> None:
        """Handle the reply to a `release`: requests sent before an acknowledged marker and still open are resent."""
        markers = [i.removeprefix(self._prefix) for i in ids if i.startswith(self._prefix)]
        last = max((int(marker) for marker in markers if marker.isdecimal()), default=-1)
        for request in self._open.values():
            if request.mark is not None and request.mark <= last:
                request.mark = None
