"""All ZeroMQ sockets and their options. Peers connect with a DEALER; the broker binds a ROUTER.

Each socket belongs to one thread. Other threads pass messages to this thread through a Mailbox. Endpoints are ipc paths
in private folders or tcp ports on the loopback interface. Other addresses require keys (keys.py) for encryption and
authentication.
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
from wfm_ds.transport.keys import BrokerKeys, ClientKeys
from wfm_ds.transport.socket_folders import MAX_IPC_PATH_BYTES, hold_folder
from wfm_ds.transport.wire import MAX_FRAME_BYTES, Buffer

LINGER_MS = 2000
HIGH_WATER_MARK = 64  # messages; a safety net, since credit limits the queue
ZAP_DOMAIN = b"wfm"
REOPEN_DELAY_S = 1.0  # before reconnecting to a broker that rejected this peer
WILDCARD_HOSTS = ("*", "0.0.0.0", "::")

HANDSHAKE_FAILED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

T = TypeVar("T")


class PipeError(UserError):
    """An endpoint cannot be bound, is not allowed, or does not reply."""


class EndpointNotAllowed(PipeError):
    """The endpoint is invalid or insecure. Retrying does not help."""


class PeerUnreachable(Exception):
    """The peer is not connected. Nothing was sent."""


class SendQueueFull(Exception):
    """The send queue is full because the peer does not read. Nothing was sent."""


class Mailbox(Generic[T]):
    """Queue of items for one receiving thread, which polls `fileno()`. `put` is thread-safe and never blocks."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt `put` and call it

    def fileno(self) -> int:
        return self._reader.fileno()

    def put(self, item: T) -> None:
        self._items.append(item)
        with self._lock, contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"!")  # a full pipe also wakes the reader; a closed one has no reader

    def take_all(self) -> list[T]:
        """Remove all items and return them in order. Only the receiving thread may call it."""
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
    """Return the endpoint if it is allowed, else raise EndpointNotAllowed with a suggestion.

    Without keys, ipc://PATH and loopback tcp:// addresses are allowed. With keys, all tcp:// addresses except wildcards
    are allowed too.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/") or len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            raise EndpointNotAllowed(
                f"{endpoint}: an ipc path must be absolute and at most {MAX_IPC_PATH_BYTES} bytes long"
            )
        return endpoint
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(\d{1,5}|\*)", endpoint)
    if not match:
        raise EndpointNotAllowed(f"{endpoint!r} is not an endpoint; use ipc:///PATH or tcp://127.0.0.1:PORT")
    host = match[1].strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if loopback or (keys and host not in WILDCARD_HOSTS):
        return endpoint
    if keys:
        raise EndpointNotAllowed(f"{endpoint}: use one address of this machine, not a wildcard")
    raise EndpointNotAllowed(f"{endpoint}: only ipc:// and loopback tcp are allowed without keys (no encryption)")


class Router:
    """The broker's ROUTER socket. Each connected peer has a route (zmq routing id)."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: BrokerKeys | None = None) -> None:
        """Bind the endpoint. Raises PipeError if this fails.

        With `keys`, `start_authenticator` must be running in the context.
        """
        check_endpoint(endpoint, keys=keys is not None)
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        self._folder = None if path is None else hold_folder(path.parent)  # its creator may exit before this process
        self._lock_file = None if path is None else _lock_socket(path)
        self.socket = context.socket(zmq.ROUTER)
        _set_options(self.socket, endpoint)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # else undeliverable messages are silently dropped
        if keys is not None:
            self.socket.set(zmq.CURVE_SERVER, 1)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            self.remove_files()
            raise PipeError(f"cannot listen at {endpoint}: {error.strerror}") from error
        self.endpoint: str = self.socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Return the next message as (route, frames), or None if no message has arrived."""
        frames = _receive_frames(self.socket)
        return None if frames is None else (frames[0].bytes, frames[1:])

    def send(self, route: bytes, header: bytes, payload: Sequence[zmq.Frame] = ()) -> None:
        """Send a message. Raises PeerUnreachable or SendQueueFull if it was not sent."""
        _send_frames(self.socket, [route, header, *payload])

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)

    def remove_files(self) -> None:
        """Remove the files of an ipc socket. Call it after context.term(), because zmq may use them until then."""
        if self._lock_file is not None:
            path = Path(self._lock_file.name)
            path.with_suffix("").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._lock_file.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def sender_key(frame: zmq.Frame) -> str:
    """Return the public key of the peer that sent `frame`, or "" if the socket does not use keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Dealer:
    """A peer's DEALER socket, connected to one broker. The broker may start later, and may restart."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: ClientKeys | None = None) -> None:
        check_endpoint(endpoint, keys=keys is not None)
        self._keys = keys
        self._problem = ""
        self._opened_at_s = time.monotonic()
        self.socket = context.socket(zmq.DEALER)
        _set_options(self.socket, endpoint)
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing is queued while disconnected, so outages are noticed
        self.socket.set(zmq.RECONNECT_IVL, 100)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            self.socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self.socket.set(zmq.CURVE_SERVERKEY, keys.broker)
        self._monitor = self.socket.get_monitor_socket(HANDSHAKE_FAILED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        self.endpoint = endpoint

    def receive(self) -> list[zmq.Frame] | None:
        return _receive_frames(self.socket)

    def send(self, header: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message without copying its payload. Raises SendQueueFull if no broker reads."""
        _send_frames(self.socket, [header, *payload])

    def connection_problem(self) -> str:
        """Return why the broker rejected the last connection attempt, or "" if it was not rejected."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._problem = ""
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                name = self._keys.name if self._keys is not None else ""
                self._problem = f"the broker does not accept key {name}: copy public/{name}.key to its key folder"
            elif self._keys is not None:
                self._problem = "handshake failed: public/hub.key is not the broker's key, or it has none"
            else:
                self._problem = "handshake failed: the broker requires keys, or this is another service"
        return self._problem

    def is_settled(self) -> bool:
        """Return whether the socket has been open long enough to complete a handshake."""
        return time.monotonic() - self._opened_at_s > REOPEN_DELAY_S

    def is_stale(self) -> bool:
        """Return whether the broker rejected this socket, so that it must be opened again.

        zmq does not reconnect to a broker that rejected a socket.
        """
        return bool(self.connection_problem()) and self.is_settled()

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=LINGER_MS)


def start_authenticator(context: zmq.Context[Any], keys: BrokerKeys) -> ThreadAuthenticator:
    """Start a thread that accepts peers with allowed keys. Stop it before the context is terminated."""

    class KeyCheck:
        def callback(self, domain: str, key: bytes) -> bool:
            return keys.is_allowed(key)

    thread = ThreadAuthenticator(context)
    thread.start()
    thread.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=KeyCheck())
    return thread


def _set_options(sock: zmq.Socket[Any], endpoint: str) -> None:
    sock.set(zmq.IPV6, int(endpoint.startswith("tcp://[")))  # else localhost may resolve to another address
    sock.set(zmq.LINGER, LINGER_MS)
    sock.set(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.set(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 64 * 1024)  # per frame
    sock.set(zmq.HANDSHAKE_IVL, 5000)  # silent connections release their descriptor soon
    sock.set(zmq.HEARTBEAT_IVL, 2000)
    sock.set(zmq.HEARTBEAT_TIMEOUT, 10000)
    sock.set(zmq.HEARTBEAT_TTL, 10000)
    sock.set(zmq.BACKLOG, 512)


def _receive_frames(sock: zmq.Socket[Any]) -> list[zmq.Frame] | None:
    try:
        frames: list[zmq.Frame] = sock.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return frames


def _send_frames(sock: zmq.Socket[Any], frames: Sequence[Any]) -> None:
    try:
        sock.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again as error:
        raise SendQueueFull from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerUnreachable from error
        raise


def _lock_socket(path: Path) -> Any:
    """Lock the file PATH.lock. Without the lock, another process that binds PATH would silently replace this socket."""
    try:
        lock_file = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise PipeError(f"cannot listen at ipc://{path}: {error.strerror}") from error
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock_file.close()
        raise PipeError(f"cannot listen at ipc://{path}: another process already does") from error
    return lock_file
