"""The payloads that a client has asked a hub for, and which of these requests are lost and must be repeated.

How long a payload takes depends on its size and on the network: time does not prove a request lost, and repeating one
in vain makes the others wait. Order does prove it, as a hub answers what comes over one connection in turn: requests
are followed by small messages that are always answered, the marks, and a request that has no answer when a later mark
has one was lost, or its answer was. A mark is a `release` of nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MARK_S = 5.0  # between marks
MAX_OPEN = 4  # requests at once

Send = Callable[[str, Mapping[str, Any]], bool]


@dataclass(slots=True)
class Request:
    """A message that is answered by a payload, or by `missing`."""

    type: str
    fields: Mapping[str, Any]
    mark: int | None = None  # the first that is sent after it; None: it has to be sent


class Requests:
    """Requests without an answer, in the order in which they were made. For one thread."""

    def __init__(self, name: str) -> None:
        """`name`: of this client's marks, which no task's id begins with."""
        self._prefix = f"{name}/"
        self._open: dict[str, Request] = {}  # by the id of what is to arrive
        self._mark = 0  # the next one
        self._marked_at_s = float("-inf")

    def add(self, requests: Mapping[str, Request]) -> None:
        self._open.update(requests)

    def close(self, key: str) -> bool:
        """Forget a request that is answered or withdrawn; True if it was open."""
        return self._open.pop(key, None) is not None

    def send(self, now_s: float, send: Send) -> None:
        """Send what has to be sent, by `send(type, fields)`, which is False if it could not be sent."""
        for request in itertools.islice(self._open.values(), MAX_OPEN):
            if request.mark is None and send(request.type, request.fields):
                request.mark = self._mark
        marks = {"ids": [f"{self._prefix}{self._mark}"]}
        if self._open and now_s - self._marked_at_s > MARK_S and send("release", marks):
            self._mark, self._marked_at_s = self._mark + 1, now_s

    def released(self, ids: Iterable[str]) -> None:
        """The hub's answer to a `release`: what was sent before a mark and is still open is sent again."""
        marks = [i.removeprefix(self._prefix) for i in ids if i.startswith(self._prefix)]
        last = max((int(mark) for mark in marks if mark.isdecimal()), default=-1)
        for request in self._open.values():
            if request.mark is not None and request.mark <= last:
                request.mark = None
