"""Message layer over one of the broker's ROUTER sockets.

It decodes incoming messages, rejects and counts invalid ones, and numbers outgoing messages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.messages import REASON_CHARS
from wfm_ds.transport.sockets import PeerUnreachable, Router, SendQueueFull
from wfm_ds.transport.throttle import get_throttled_logger
from wfm_ds.transport.wire import Message, TensorSpec, WireError

peer_log = get_throttled_logger(f"{__name__}.peers")

MESSAGES_PER_TURN = 256  # per socket, so that neither socket starves the other

MessageHandler: TypeAlias = Callable[
    [bytes, Message, list[zmq.Frame], float], None
]  # route, message, its frames, now_s


class MessagePort:
    """Sends and receives messages over one ROUTER socket. Used only by the broker's thread.

    The creator of the router closes it.
    """

    def __init__(self, router: Router, expected_types: frozenset[str], rejected: Counter[str]) -> None:
        """expected_types: message types that may arrive.

        rejected: {endpoint: number of invalid messages}. This object updates it.
        """
        self.router = router
        self._expected_types = expected_types
        self._rejected = rejected
        self._message_ids = itertools.count(1)

    def receive_messages(self, handle: MessageHandler, now_s: float) -> None:
        """Pass arrived messages to `handle`. A message is rejected if it is invalid or `handle` raises WireError."""
        for _ in range(MESSAGES_PER_TURN):
            received = self.router.receive()
            if received is None:
                return
            route, frames = received
            try:
                message = wire.decode_message([frame.buffer for frame in frames], self._expected_types)
                handle(route, message, frames, now_s)
            except WireError as error:
                self._rejected[self.router.endpoint] += 1
                peer_log.warning("dropped a message at %s: %s", self.router.endpoint, error)
                self.send(route, "reject", {"about": 0, "why": str(error)[:REASON_CHARS]})

    def encode(self, message_type: str, fields: Mapping[str, Any], specs: Sequence[TensorSpec] = ()) -> bytes:
        """Return the header of a message, to be passed to `router.send`. Raises WireError if it is too large."""
        return wire.encode_header(message_type, next(self._message_ids), fields, specs)

    def send(
        self,
        route: bytes,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        payload: Sequence[Any] = (),
    ) -> bool:
        """Send a message of a type that the protocol repeats if it is lost. Returns False if it was not sent."""
        try:
            self.router.send(route, self.encode(message_type, fields, specs), payload)
        except (PeerUnreachable, SendQueueFull):
            return False
        return True
