"""Maximum number and idle timeout of connections of the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import resource
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from aiohttp.web import Server

TICK_S = 1.0  # seconds between checks for idle connections, and before accepting again after an error
DESCRIPTOR_SHARE = 4  # HTTP may use a quarter of the descriptors; trainers and workers need the rest
BACKLOG = 128


class ConnectionAcceptor:
    """Accepts connections for an aiohttp server. Use it within the server's event loop.

    A connection is closed after `idle_s` seconds without a complete request. Requests in progress have separate
    deadlines (see `request_body.py`).
    """

    def __init__(self, server: Server, max_connections: int, idle_s: float, log: logging.Logger) -> None:
        self._server = server
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = 2**20 if soft == resource.RLIM_INFINITY else soft
        self._max = min(max_connections, max(1, descriptors // DESCRIPTOR_SHARE))
        self._idle_s = idle_s
        self._log = log
        self._idle_since_s: dict[Any, float] = {}  # by aiohttp protocol; inf during a request
        self._loop = asyncio.get_running_loop()

    async def serve(self, listeners: Iterable[socket.socket]) -> None:
        """Accept connections until cancelled. The aiohttp server keeps handling connections that are still open."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._close_idle_connections())
            for listener in listeners:
                tasks.create_task(self._accept_connections(listener))

    @contextlib.contextmanager
    def track_request(self, protocol: Any) -> Iterator[None]:
        """Exempt a connection from the idle timeout in the `with` block. The timeout starts again at the end."""
        self._idle_since_s[protocol] = math.inf
        try:
            yield
        finally:
            self._idle_since_s[protocol] = self._loop.time()

    async def _accept_connections(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of descriptors or memory; try again later
                self._log.warning("cannot accept HTTP connections at the moment: %s", error)
                await asyncio.sleep(TICK_S)
                continue
            if len(self._server.connections) >= self._max:
                self._log.warning("rejecting an HTTP connection: %d are open (http.max_connections)", self._max)
                _refuse_connection(connection)
                continue
            try:
                await self._loop.connect_accepted_socket(self._server, connection)
            except OSError:  # the client has disconnected
                connection.close()

    async def _close_idle_connections(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            self._idle_since_s = {p: self._idle_since_s.get(p, now_s) for p in self._server.connections}
            for protocol, since_s in self._idle_since_s.items():
                if now_s - since_s > self._idle_s and protocol.transport is not None:
                    protocol.transport.abort()  # `close` would wait until the client reads the reply


def open_listeners(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket for each address of `host`, all with the same port. Raises OSError."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(addresses):
        listener = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
        listener.setblocking(False)
        port = listener.getsockname()[1]  # for port 0
        yield listener


def _refuse_connection(connection: socket.socket) -> None:
    detail = "too many open connections: try again later"
    body = json.dumps({"message": detail, "error": {"code": "connections", "detail": detail}})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: 5\r\nConnection: close"
    with connection, contextlib.suppress(OSError):  # the client may have disconnected
        connection.setblocking(False)
        connection.send(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n\r\n{body}".encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(2**16)  # unread bytes would reset the connection and lose the reply
