"""One ROUTER of a hub as messages: what comes in is decoded, or rejected and counted; what goes out is numbered."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import zmq

from wfm_ds.pipes import wire
from wfm_ds.pipes.messages import REASON_CHARS
from wfm_ds.pipes.sockets import Full, Router, Unreachable
from wfm_ds.pipes.throttle import Throttle
from wfm_ds.pipes.wire import Message, TensorSpec, WireError

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256  # of one socket, so that neither starves the other

Handler: TypeAlias = Callable[[bytes, Message, list[zmq.Frame], float], None]  # route, message, its frames, now_s


class Port:
    """The hub's thread alone uses it; whoever made the router closes it."""

    def __init__(self, router: Router, expected: frozenset[str], rejected: Counter[str]) -> None:
        """`expected`: the message types that may come in. `rejected` counts the others, by endpoint."""
        self.router = router
        self._expected = expected
        self._rejected = rejected
        self._mids = itertools.count(1)
        self._drops = Throttle(log.warning)

    def receive(self, handle: Handler, now_s: float) -> None:
        """Hand over what has come; reject what is not a message for this port, and what `handle` refuses."""
        self._drops.look(now_s)
        for _ in range(MESSAGES_PER_TURN):
            received = self.router.receive()
            if received is None:
                return
            route, frames = received
            try:
                message = wire.decode([frame.buffer for frame in frames], self._expected)
                handle(route, message, frames, now_s)
            except WireError as error:
                self._rejected[self.router.endpoint] += 1
                self._drops.tell(error.reason, f"dropped a message at {self.router.endpoint}: {error}", now_s)
                self.send(route, "reject", {"about": 0, "why": str(error)[:REASON_CHARS]})

    def close(self, now_s: float) -> None:
        """Log what was dropped and not logged yet."""
        self._drops.close(now_s)

    def encode(self, message_type: str, fields: Mapping[str, Any], specs: Sequence[TensorSpec] = ()) -> bytes:
        """The header of a message that `router.send` takes later. Raises WireError if it is too large."""
        return wire.encode(message_type, next(self._mids), fields, specs)

    def send(
        self,
        route: bytes,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        payload: Sequence[Any] = (),
    ) -> bool:
        """Send; False if it could not be sent. The protocol repeats everything sent this way if it is lost."""
        try:
            self.router.send(route, self.encode(message_type, fields, specs), payload)
        except (Unreachable, Full):
            return False
        return True
