"""A client's open payload requests. Detects lost requests, which must be sent again.

A timeout cannot detect a lost request, because the transfer time depends on payload size and network, and sending a
request twice delays other requests. The order of messages can detect it, because the broker replies in order on each
connection. After requests, the client sends *markers*: small messages that always get a reply. If a marker gets a reply
before an earlier request does, the request or its reply was lost. A marker is a `release` message with the id of a
nonexistent task.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MARKER_INTERVAL_S = 5.0  # between markers
MAX_OPEN_REQUESTS = 4  # concurrent requests

SendMessage = Callable[[str, Mapping[str, Any]], bool]


@dataclass(slots=True)
class PayloadRequest:
    """A request that the broker answers with a `payload` or `missing` message."""

    type: str
    fields: Mapping[str, Any]
    marker: int | None = None  # first marker sent after it; None: to be (re)sent


class PayloadRequests:
    """Requests that have no reply yet, in order of creation. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """name: prefix of this client's marker ids. Task ids must not start with it."""
        self._prefix = f"{name}/"
        self._open: dict[str, PayloadRequest] = {}  # by the id of the expected payload
        self._next_marker = 0  # number of the next marker
        self._marker_sent_s = float("-inf")

    def add(self, requests: Mapping[str, PayloadRequest]) -> None:
        self._open.update(requests)

    def close(self, key: str) -> bool:
        """Remove a request that was answered or cancelled. Returns True if it was open."""
        return self._open.pop(key, None) is not None

    def send(self, now_s: float, send: SendMessage) -> None:
        """Send all requests that were not sent yet, and a marker if one is due.

        send: called as send(type, fields). Returns False if the message could not be sent.
        """
        for request in itertools.islice(self._open.values(), MAX_OPEN_REQUESTS):
            if request.marker is None and send(request.type, request.fields):
                request.marker = self._next_marker
        marker = {"ids": [f"{self._prefix}{self._next_marker}"]}
        if self._open and now_s - self._marker_sent_s > MARKER_INTERVAL_S and send("release", marker):
            self._next_marker, self._marker_sent_s = self._next_marker + 1, now_s

    def on_released(self, ids: Iterable[str]) -> None:
        """Handle a `released` reply to a marker.

        Requests that were sent before the marker and are still open are sent again.
        """
        markers = [i.removeprefix(self._prefix) for i in ids if i.startswith(self._prefix)]
        last = max((int(marker) for marker in markers if marker.isdecimal()), default=-1)
        for request in self._open.values():
            if request.marker is not None and request.marker <= last:
                request.marker = None
