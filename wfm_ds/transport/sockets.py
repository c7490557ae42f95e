"""All ZeroMQ sockets and their options. Peers connect with a DEALER; the broker binds a ROUTER.

Each socket belongs to one thread. Other threads pass messages to this thread through a Mailbox.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from wfm_ds.errors import UserError
from wfm_ds.storage.filesystem import read_regular
from wfm_ds.transport import wire
from wfm_ds.transport.keys import BrokerKeys, ClientKeys
from wfm_ds.transport.messages import REASON_CHARS
from wfm_ds.transport.socket_folders import MAX_IPC_PATH_BYTES, hold_folder
from wfm_ds.transport.throttle import get_throttled_logger
from wfm_ds.transport.wire import MAX_FRAME_BYTES, Buffer, Message, TensorSpec, WireError

peer_log = get_throttled_logger(f"{__name__}.peers")

LINGER_MS = 2000
HIGH_WATER_MARK = 64  # unsent messages per peer; rarely reached, because the workers' credit limits them
ZAP_DOMAIN = b"wfm"
REOPEN_DELAY_S = 1.0  # before reconnecting to a broker that rejected this peer
MAX_STEP_S = 2.0  # longest step of ActiveClock; if two ticks are further apart, the process was suspended
MESSAGES_PER_TURN = 256  # per MessagePort, so that neither port starves the other
WILDCARD_HOSTS = ("*", "0.0.0.0", "::")

HANDSHAKE_FAILED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

T = TypeVar("T")
MessageHandler: TypeAlias = Callable[[bytes, Message, list[zmq.Frame], float], None]  # route, message, frames, now_s


class PipeError(UserError):
    """Raised if an endpoint cannot be bound, is not allowed, or does not reply."""


class EndpointNotAllowed(PipeError):
    """Raised if an endpoint is invalid or insecure. Retrying does not help."""


class PeerUnreachable(Exception):
    """Raised if a message was not sent because the peer is not connected."""


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
        """Remove all items and return them in order. Only the receiving thread may call this."""
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


class ActiveClock:
    """A clock without the time for which this process was suspended: each tick adds at most MAX_STEP_S."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self._last_tick_s = now_s

    def tick(self, now_s: float) -> float:
        """Advance the clock and return its time. Call it several times in every MAX_STEP_S seconds, in one thread."""
        self.now_s += min(now_s - self._last_tick_s, MAX_STEP_S)
        self._last_tick_s = now_s
        return self.now_s


def check_endpoint(endpoint: str, *, keys: bool = False) -> str:
    """Return the endpoint if it is allowed, else raise EndpointNotAllowed with a suggestion.

    Without keys, only ipc://PATH is allowed. With keys, tcp://HOST:PORT is allowed too, but no wildcard as HOST.
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
        raise EndpointNotAllowed(f"{endpoint!r} is not an endpoint; use ipc:///PATH or tcp://HOST:PORT")
    if not keys:
        raise EndpointNotAllowed(f"{endpoint}: tcp:// needs keys (wfm keys new DIR NAME); without keys, use ipc://")
    if match[1].strip("[]") in WILDCARD_HOSTS:
        raise EndpointNotAllowed(f"{endpoint}: use one address of this machine, not a wildcard")
    return endpoint


def resolve_endpoint(endpoint: str, *, keys: bool = False) -> str:
    """Return the endpoint, or the client address in a pipes.json file. Raises PipeError if it cannot be read."""
    if "://" in endpoint:
        return check_endpoint(endpoint, keys=keys)
    try:
        content = json.loads(read_regular(endpoint))
    except FileNotFoundError as error:
        raise PipeError(f"{endpoint} does not exist; the service writes it when it is ready") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PipeError(f"{endpoint} cannot be read: {error}") from error
    address = content.get("clients") if isinstance(content, dict) else None
    if not isinstance(address, str):
        raise PipeError(f"{endpoint} has no address for `clients`")
    return check_endpoint(address, keys=keys)


class MessagePort:
    """A ROUTER socket of the broker, which gives each connected peer a route (zmq routing id).

    It decodes incoming messages, rejects and counts invalid ones, and numbers outgoing messages.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        keys: BrokerKeys | None,
        expected_types: frozenset[str],
        rejected: Counter[str],
    ) -> None:
        """Bind the endpoint. Raises PipeError if this fails.

        keys: if set, call `start_authenticator` for the zmq context first.
        rejected: {endpoint: number of invalid messages}. This object updates it.
        """
        self._expected_types, self._rejected = expected_types, rejected
        self._message_ids = itertools.count(1)
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

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)

    def remove_files(self) -> None:
        """Remove the files of an ipc socket. Call this after context.term(), when zmq no longer uses the files."""
        if self._lock_file is not None:
            path = Path(self._lock_file.name)
            path.with_suffix("").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._lock_file.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def receive_messages(self, handle: MessageHandler, now_s: float) -> None:
        """Pass arrived messages to `handle`. A message is rejected if it is invalid or `handle` raises WireError."""
        for _ in range(MESSAGES_PER_TURN):
            if (received := receive_frames(self.socket)) is None:
                return
            route, frames = received[0].bytes, received[1:]
            try:
                message = wire.decode_message([frame.buffer for frame in frames], self._expected_types)
                handle(route, message, frames, now_s)
            except WireError as error:
                self._rejected[self.endpoint] += 1
                peer_log.warning("dropped a message at %s: %s", self.endpoint, error)
                self.send_message(route, "reject", {"about": 0, "why": str(error)[:REASON_CHARS]})

    def encode(self, message_type: str, fields: Mapping[str, Any], specs: Sequence[TensorSpec] = ()) -> bytes:
        """Return the header of a message, to be passed to `send`. Raises WireError if it is too large."""
        return wire.encode_header(message_type, next(self._message_ids), fields, specs)

    def send(self, route: bytes, header: bytes, payload: Sequence[zmq.Frame] = ()) -> None:
        """Send a message. Raises zmq.Again if the peer's queue is full, or PeerUnreachable."""
        try:
            self.socket.send_multipart([route, header, *payload], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerUnreachable from error
            raise

    def send_message(
        self,
        route: bytes,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        payload: Sequence[Any] = (),
    ) -> bool:
        """Send a message that the protocol repeats if it is lost. Returns False if it was not sent."""
        try:
            self.send(route, self.encode(message_type, fields, specs), payload)
        except (PeerUnreachable, zmq.Again):
            return False
        return True


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
        self._message_ids = itertools.count(1)
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

    def receive_message(self, expected_types: frozenset[str]) -> Message | None:
        """Return the next valid message, or None if none has arrived. Invalid messages are dropped."""
        while (frames := receive_frames(self.socket)) is not None:
            try:
                return wire.decode_message([frame.buffer for frame in frames], expected_types)
            except WireError as error:
                peer_log.warning("dropped a message from the broker: %s", error)
        return None

    def send_message(
        self,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        frames: Sequence[Buffer] = (),
    ) -> bool:
        """Send a message without copying its frames. Returns False if the send queue is full."""
        header = wire.encode_header(message_type, next(self._message_ids), fields, specs)
        try:
            self.socket.send_multipart([header, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

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
        """Return whether the broker rejected this socket, so that a new one is needed."""
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
    # No limit: libzmq 4.3.5 aborts if it reads a PING of a peer that hung up while the limit was reached.
    sock.set(zmq.RCVHWM, 0)
    sock.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 64 * 1024)  # per frame
    sock.set(zmq.HANDSHAKE_IVL, 5000)  # silent connections release their descriptor soon
    sock.set(zmq.BACKLOG, 512)
    # If the peer's machine is gone, the kernel closes the connection after 10 s. ZeroMQ's heartbeats are not used for
    # this: libzmq 4.3.5 aborts if a heartbeat is due after the peer hung up and before its last message was read
    # (libzmq issue 4364).
    sock.set(zmq.TCP_KEEPALIVE, 1)
    sock.set(zmq.TCP_KEEPALIVE_IDLE, 4)
    sock.set(zmq.TCP_KEEPALIVE_INTVL, 2)
    sock.set(zmq.TCP_KEEPALIVE_CNT, 3)
    sock.set(zmq.TCP_MAXRT, 10000)  # with unsent data, this deadline applies instead


def poll_sockets(sources: Iterable[Any], timeout_ms: int) -> set[Any]:
    """Wait for sockets, mailboxes and descriptors (None is skipped). Returns the readable sockets and descriptors."""
    poller = zmq.Poller()
    for source in sources:
        if source is not None:
            poller.register(source, zmq.POLLIN)
    return {source for source, _ in poller.poll(timeout_ms)}


def receive_frames(sock: zmq.Socket[Any]) -> list[zmq.Frame] | None:
    """Return the next message, or None if none has arrived."""
    try:
        frames: list[zmq.Frame] = sock.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return frames


def _lock_socket(path: Path) -> Any:
    """Lock the file PATH.lock, because another process that binds PATH would silently replace this socket."""
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
