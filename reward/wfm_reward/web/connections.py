"""Connections of the HTTP port: how many there may be, and how long one may stay without a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
import socket
from typing import Any

from aiohttp.web import Server

TICK_S = 1.0  # between two looks at idle connections; also before accepting goes on after an error
DESCRIPTOR_SHARE = 4  # the port takes one descriptor in this many: the others are for trainers and workers
BACKLOG = 128


class Connections:
    """Accept connections for a server of aiohttp. Use within its event loop.

    A connection without a request in hand for `idle_s` is cut off, whether its client is silent, sends a header byte by
    byte, or does not read its answer. A request in hand has deadlines of its own (body.py).
    """

    def __init__(self, server: Server, max_connections: int, idle_s: float, log: logging.Logger) -> None:
        self._server = server
        self._max = min(max_connections, max(1, _descriptors() // DESCRIPTOR_SHARE))
        self._idle_s = idle_s
        self._log = log
        self._idle_since_s: dict[Any, float] = {}  # by aiohttp's protocol; inf while it has a request in hand
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Bind all addresses of the host. Return the first one. Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
            listener.setblocking(False)
            self._sockets.append(listener)
            port = listener.getsockname()[1]  # where any free one was asked for, the other addresses get the same
        bound = self._sockets[0].getsockname()
        return bound[0], bound[1]

    async def serve(self) -> None:
        """Accept connections until cancelled. Those that are open then belong to the server."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._cut_off_idle())
                for listener in self._sockets:
                    tasks.create_task(self._accept(listener))
        finally:
            for listener in self._sockets:
                listener.close()

    def begin_request(self, protocol: Any) -> None:
        self._idle_since_s[protocol] = math.inf

    def end_request(self, protocol: Any) -> None:
        """Give the client `idle_s` to fetch the answer, or to send the next request."""
        self._idle_since_s[protocol] = self._loop.time()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptors, no memory: later there may be some
                self._log.warning("cannot accept HTTP connections for now: %s", error)
                await asyncio.sleep(TICK_S)
                continue
            if len(self._server.connections) >= self._max:
                self._log.warning("%d HTTP connections are open, and no more are accepted", self._max)
                _refuse(connection)
                continue
            try:
                _, protocol = await self._loop.connect_accepted_socket(self._server, connection)
            except OSError:  # its client has left
                connection.close()
            else:
                self._idle_since_s.setdefault(protocol, self._loop.time())

    async def _cut_off_idle(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s, there = self._loop.time(), set(self._server.connections)
            for protocol, since_s in list(self._idle_since_s.items()):
                if since_s != math.inf and protocol not in there:
                    del self._idle_since_s[protocol]
                elif now_s - since_s > self._idle_s and protocol.transport is not None:
                    protocol.transport.abort()  # `close` would wait for the client to read its answer


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _refuse(connection: socket.socket) -> None:
    """Answer 503 without waiting for the request, and close."""
    detail = "this service has as many connections as it takes: try again later"
    body = json.dumps({"message": detail, "error": {"code": "connections", "detail": detail}})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: 5\r\nConnection: close"
    with connection, contextlib.suppress(OSError):  # a new socket has room for a few bytes, or its client has left
        connection.setblocking(False)
        connection.send(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n\r\n{body}".encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(2**16)  # what is closed with bytes unread is reset, and the client may never see the answer
