"""The only place that opens a socket and sets its options. DEALER (a peer, connects) <-> ROUTER (a hub, binds).

A socket belongs to one thread. Other threads reach that thread through its Mailbox. Endpoints are ipc paths in private
folders or loopback tcp; on other addresses of this machine nothing listens without keys (keys.py), which encrypt and
authenticate.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from wfm_ds.errors import UserError
from wfm_ds.pipes.folders import IPC_PATH_BYTES, hold
from wfm_ds.pipes.keys import ClientKeys, HubKeys
from wfm_ds.pipes.wire import FRAME_BYTES, Buffer

LINGER_MS = 2000
HIGH_WATER_MARK = 64  # messages; a safety net, credit is the bound
ZAP_DOMAIN = b"wfm"
REOPEN_S = 1.0  # before a hub that has refused a peer is tried again
EVERY_INTERFACE = ("*", "0.0.0.0", "::")

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

T = TypeVar("T")


class PipeError(UserError):
    """An endpoint cannot be bound, is not allowed, or nobody answers there."""


class NotAllowed(PipeError):
    """An endpoint that is not used as it is: waiting does not help."""


class Unreachable(Exception):
    """The peer is gone, or there is none yet: nothing was sent."""


class Full(Exception):
    """The peer does not read; nothing was sent."""


class Mailbox(Generic[T]):
    """A queue to the thread that polls `fileno()`. `put` may be called from any thread, and never blocks."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.RLock()  # a signal handler may put while another one does

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, item: T) -> None:
        self._items.append(item)
        with self._lock, contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"!")  # a full pipe wakes the reader as well; a closed one has no reader

    def take(self) -> list[T]:
        """Take everything put so far, in order; the polling thread calls it."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()


def check_endpoint(endpoint: str, *, keys: bool = False) -> str:
    """The endpoint, if it may be used: ipc://PATH, tcp:// on loopback, or with keys any one tcp:// address.

    Raises NotAllowed with the way out.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/") or len(os.fsencode(path)) > IPC_PATH_BYTES:
            raise NotAllowed(f"{endpoint}: an ipc path is absolute and at most {IPC_PATH_BYTES} bytes long")
        return endpoint
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(\d{1,5}|\*)", endpoint)
    if not match:
        raise NotAllowed(f"{endpoint!r} is not an endpoint; write ipc:///PATH or tcp://127.0.0.1:PORT")
    host = match[1].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback or (keys and host not in EVERY_INTERFACE):
        return endpoint
    if keys:
        raise NotAllowed(f"{endpoint}: name one address of this machine, not all of them")
    raise NotAllowed(f"{endpoint}: only ipc:// and loopback tcp are allowed without keys, messages travel unencrypted")


class Router:
    """The hub's end: many peers, addressed by the routes that zmq gave them."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: HubKeys | None = None) -> None:
        """`keys` need a ThreadAuthenticator in the context (`authenticator`). Raises PipeError if the endpoint is not
        allowed, or in use."""
        check_endpoint(endpoint, keys=keys is not None)
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        self._folder = None if path is None else hold(path.parent)  # whoever made it may be killed before us
        self._lock_file = None if path is None else _locked(path)
        self.socket = context.socket(zmq.ROUTER)
        _set_options(self.socket, endpoint)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # else what cannot be delivered vanishes silently
        if keys is not None:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            self.release()
            raise PipeError(f"cannot listen at {endpoint}: {error.strerror}") from error
        self.endpoint: str = self.socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """The next message and its route, None if there is none now."""
        frames = _receive(self.socket)
        return None if frames is None else (frames[0].bytes, frames[1:])

    def send(self, route: bytes, header: bytes, payload: Sequence[zmq.Frame] = ()) -> None:
        """Raises Unreachable if the route is gone, Full if its peer does not read; in both cases nothing was sent."""
        _send(self.socket, [route, header, *payload])

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)

    def release(self) -> None:
        """Remove an ipc socket's files, after the context is terminated: until then zmq may still do so itself."""
        if self._lock_file is not None:
            path = Path(self._lock_file.name)
            path.with_suffix("").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._lock_file.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def key_of(frame: zmq.Frame) -> str:
    """The public key with which the sender of a received frame was let in; "" at a socket without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Dealer:
    """A peer's end: one hub, which may come later, go, and come back."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: ClientKeys | None = None) -> None:
        check_endpoint(endpoint, keys=keys is not None)
        self._keys = keys
        self._trouble = ""
        self._opened_at_s = time.monotonic()
        self.socket = context.socket(zmq.DEALER)
        _set_options(self.socket, endpoint)
        self.socket.set(zmq.IMMEDIATE, 1)  # an outage is seen, nothing is queued for a hub that is not there
        self.socket.set(zmq.RECONNECT_IVL, 100)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.CURVE_SERVERKEY, keys.hub)
        self._monitor = self.socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        self.endpoint = endpoint

    def receive(self) -> list[zmq.Frame] | None:
        return _receive(self.socket)

    def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Raises Full if there is no hub, or it does not read; nothing was sent. The payload is not copied."""
        _send(self.socket, [header, *payload])

    def trouble(self) -> str:
        """The reason why the hub refuses this peer, as of the last attempt to connect; "" if none is known."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._trouble = ""
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                name = self._keys.name if self._keys is not None else ""
                self._trouble = f"the hub does not know the key {name}: copy public/{name}.key to its folder of keys"
            elif self._keys is not None:
                self._trouble = "no handshake: the hub has another key than public/hub.key here, or uses none"
            else:
                self._trouble = "no handshake: the hub wants keys, or this is no hub"
        return self._trouble

    def settled(self) -> bool:
        """True when there was time for a first handshake."""
        return time.monotonic() - self._opened_at_s > REOPEN_S

    def stale(self) -> bool:
        """True when another must be opened: zmq does not return by itself to a hub that has refused it."""
        return bool(self.trouble()) and self.settled()

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=LINGER_MS)


def authenticator(context: zmq.Context[Any], keys: HubKeys) -> ThreadAuthenticator:
    """A thread that lets peers with allowed keys connect. The caller stops it before the context ends."""

    class Allowed:
        def callback(self, domain: str, key: bytes) -> bool:
            return keys.allowed(key)

    thread = ThreadAuthenticator(context)
    thread.start()
    thread.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=Allowed())
    return thread


def _set_options(sock: zmq.Socket[Any], endpoint: str) -> None:
    sock.set(zmq.IPV6, int(endpoint.startswith("tcp://[")))  # else localhost could be another address than the hub's
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.set(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.set(zmq.MAXMSGSIZE, FRAME_BYTES + 64 * 1024)  # for each frame
    sock.set(zmq.HANDSHAKE_IVL, 5000)  # silent connections do not keep a descriptor for long
    sock.set(zmq.HEARTBEAT_IVL, 2000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 10000)
    sock.set(zmq.HEARTBEAT_TTL, 10000)
    sock.set(zmq.BACKLOG, 512)


def _receive(sock: zmq.Socket[Any]) -> list[zmq.Frame] | None:
    try:
        frames: list[zmq.Frame] = sock.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return frames


def _send(sock: zmq.Socket[Any], frames: Sequence[Any]) -> None:
    try:
        sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again as error:
        raise Full from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise Unreachable from error
        raise


def _locked(path: Path) -> Any:
    """An open lock file beside a socket: a second live bind of one ipc path would silently steal it."""
    try:
        lock_file = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise PipeError(f"cannot listen at ipc://{path}: {error.strerror}") from error
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock_file.close()
        raise PipeError(f"cannot listen at ipc://{path}: another process does") from error
    return lock_file
