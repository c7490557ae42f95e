"""Connection limits of the HTTP server: maximum number and idle timeout. aiohttp has neither."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
from collections.abc import Iterator
from typing import Any

from aiohttp.web import Server

TICK_S = 1.0  # seconds between checks for idle connections
REFUSAL_S = 0.05  # seconds to read what a rejected client sends; unread bytes would reset the connection
DESCRIPTOR_SHARE = 4  # 1 / fraction of descriptors for HTTP; trainers and workers need the rest


class ConnectionLimits:
    """Create the protocols of new connections, and close idle ones. Use it within the server's event loop.

    A connection without a current request for `idle_s` seconds is closed, for example if its client is silent, sends a
    header byte by byte, or does not read the reply. Current requests have separate deadlines (see `request_body.py`).
    """

    def __init__(self, server: Server, max_connections: int, idle_s: float, log: logging.Logger) -> None:
        self._server = server
        self._max = min(max_connections, max(1, _descriptor_limit() // DESCRIPTOR_SHARE))
        self._idle_s = idle_s
        self._log = log
        self._idle_since_s: dict[Any, float] = {}  # by aiohttp protocol; inf during a request

    def create_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection: aiohttp's, or one that replies 503 above the limit."""
        if len(self._server.connections) < self._max:
            return self._server()
        self._log.warning("rejecting an HTTP connection: %d are open (http.max_connections)", self._max)
        return _Refusal()

    @contextlib.contextmanager
    def track_request(self, protocol: Any) -> Iterator[None]:
        """Exempt the connection from the idle timeout, which starts again when the block ends."""
        self._idle_since_s[protocol] = math.inf
        try:
            yield
        finally:
            self._idle_since_s[protocol] = asyncio.get_running_loop().time()

    async def close_idle_connections(self) -> None:
        """Close idle connections until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            now_s = asyncio.get_running_loop().time()
            self._idle_since_s = {p: self._idle_since_s.get(p, now_s) for p in self._server.connections}
            for protocol, since_s in self._idle_since_s.items():
                if now_s - since_s > self._idle_s and protocol.transport is not None:
                    protocol.transport.abort()  # `close` would wait until the client reads the reply


class _Refusal(asyncio.Protocol):
    """Reply 503 without waiting for a request, then close the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        detail = "too many open connections: try again later"
        body = json.dumps({"message": detail, "error": {"code": "connections", "detail": detail}})
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: 5\r\nConnection: close"
        transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n\r\n{body}".encode())
        transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)


def _descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft
