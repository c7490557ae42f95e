"""Heartbeats: each rank reports its progress to rank 0 every few seconds over TCP.

If a rank dies or hangs, rank 0 sends a message with the name of the faulty rank to all ranks, which then exit. Rank 0
accepts only peers with a token that was broadcast over the process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.distributed.fault import Fault, RankStates
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.ranks import find_launched_rank
from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 5.0
SILENCE_TIMEOUT_S = 45.0  # long enough for a machine that swaps, short enough to end a dead run within a minute
CONNECT_TIMEOUT_S = 60.0
CHECK_INTERVAL_S = 0.5  # time between two checks of the ranks' states
FLUSH_TIMEOUT_S = 10.0  # how long rank 0 waits for the fault to reach all ranks
EXIT_TIMEOUT_S = 20.0  # how long the main thread may take to exit after a fault
MAX_LINE_BYTES = 1 << 16


class JsonConnection:
    """Sends and receives JSON objects over a connected socket, one per line. Sending is thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(None)
        self._lock = threading.Lock()
        self._unread = b""

    def send(self, **message: Any) -> bool:
        """Send keyword arguments as a JSON object. Returns False if the connection is broken or its buffer is full."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)
            return True
        return False

    def receive(self) -> list[dict[str, Any]] | None:
        """Read the socket, which must be readable: otherwise this blocks.

        Returns the complete JSON objects, or None if the peer hung up or sent invalid data.
        """
        try:
            chunk = self.sock.recv(MAX_LINE_BYTES)
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        is_invalid = len(self._unread) > MAX_LINE_BYTES or not all(isinstance(message, dict) for message in messages)
        return None if is_invalid or not chunk else messages


class RankRegistry:
    """Thread of rank 0 that receives the heartbeats of all ranks, finds the fault and sends it to all ranks."""

    def __init__(self, states: RankStates, host: str | None) -> None:
        """host: see `listen`."""
        self.token = secrets.token_hex(16)
        self._states = states
        self._connections: dict[int, JsonConnection] = {}  # by rank
        self._unauthenticated: list[JsonConnection] = []  # connected, but no token received yet
        self._stopping = threading.Event()
        self._server = listen(host)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve_ranks, name="rank-states", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=FLUSH_TIMEOUT_S)

    def wait_for_end(self) -> None:
        """Wait until the fault has been sent, at most FLUSH_TIMEOUT_S seconds."""
        self._thread.join(timeout=FLUSH_TIMEOUT_S)

    def _serve_ranks(self) -> None:
        last_sent_s = time.monotonic()
        with self._server:
            while not self._stopping.is_set():
                self._receive_messages(CHECK_INTERVAL_S)
                now_s = time.monotonic()
                if (fault := self._states.find_fault(now_s)) is not None:
                    self._send_to_all(fault=[list(fault.ranks), fault.text, fault.stuck])
                    if not fault.stuck:  # the blamed ranks no longer run
                        for rank in set(fault.ranks) & self._connections.keys():
                            self._connections.pop(rank).sock.close()
                    break
                if now_s - last_sent_s >= BEAT_INTERVAL_S:
                    self._send_to_all(alive=True)
                    last_sent_s = now_s
            else:
                self._send_to_all(bye=True)
            # Closing a socket with unread data would reset the connection, and the peer could lose the last line.
            until_s = time.monotonic() + FLUSH_TIMEOUT_S
            while self._connections and time.monotonic() < until_s:
                self._receive_messages(CHECK_INTERVAL_S)
        for line in (*self._connections.values(), *self._unauthenticated):
            line.sock.close()

    def _send_to_all(self, **message: Any) -> None:
        for _, line in sorted(self._connections.items(), reverse=True):  # rank 0 last: this process then exits
            line.send(**message)

    def _receive_messages(self, timeout_s: float) -> None:
        lines = [*self._unauthenticated, *self._connections.values()]
        readable = wait_readable([self._server, *(line.sock for line in lines)], timeout_s)
        if self._server in readable:
            with contextlib.suppress(OSError):  # the peer may have disconnected
                self._unauthenticated.append(JsonConnection(self._server.accept()[0]))
        for rank, line in list(self._connections.items()):
            if line.sock in readable:
                self._read_rank(rank, line)
        # Admit new ranks last, because this reads from their sockets. A second read in this call could block forever.
        for line in [line for line in self._unauthenticated if line.sock in readable]:
            self._admit_rank(line)

    def _admit_rank(self, line: JsonConnection) -> None:
        self._unauthenticated.remove(line)
        hello, *messages = line.receive() or [{}]
        rank = hello.get("rank")
        has_token = hmac.compare_digest(str(hello.get("token")), self.token)
        if not has_token or type(rank) is not int or not 0 <= rank < self._states.size:
            line.sock.close()
            return
        self._connections[rank] = line
        self._states.add_rank(rank, str(hello.get("where")), time.monotonic())
        self._handle_messages(rank, messages)

    def _read_rank(self, rank: int, line: JsonConnection) -> None:
        messages = line.receive()
        if messages is None:
            self._states.record_disconnect(rank, "its connection closed", time.monotonic())
            self._connections.pop(rank).sock.close()
        else:
            self._handle_messages(rank, messages)

    def _handle_messages(self, rank: int, messages: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        for message in messages:
            if "beat" in message:
                num_begun, num_advances = int(message["beat"]), int(message["signs"])
                self._states.record_beat(rank, num_begun, num_advances, str(message.get("doing")), now_s)
            elif "failed" in message:
                self._states.record_failure(rank, str(message["failed"]), bool(message.get("secondary")), now_s)
            elif "bye" in message:
                self._states.record_done(rank)


def listen(host: str | None) -> socket.socket:
    """Listen on a free port at `host`, or on all addresses if it is None or not an address of this machine."""
    try:
        if host is not None:
            return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        log.warning("heartbeat: cannot listen on %s (%s); listening on all addresses of this machine", host, error)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def wait_readable(sockets: list[socket.socket], timeout_s: float) -> set[socket.socket]:
    poll = select.poll()  # select() does not support descriptors above 1023
    by_number = {sock.fileno(): sock for sock in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(1000 * timeout_s)}


class Heartbeat:
    """Thread of every rank that sends heartbeats, receives the fault and then ends the process."""

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        *,
        on_end: Callable[[str], None],
        registry: RankRegistry | None = None,
        exit_process: Callable[[int], object] = os._exit,
        silent_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        """Connect to rank 0. Raises UserError if it is unreachable.

        on_end: called with the fault's text before the process exits, unless the main thread is in `report_failure`.
        registry: the RankRegistry, on rank 0 only.
        """
        self.rank, self.registry, self._silent_s = rank, registry, silent_s
        self._on_end, self._exit = on_end, exit_process
        self._stopping, self._run_ended, self._main_waits = threading.Event(), threading.Event(), threading.Event()
        self._fault: Fault | None = None
        try:
            self._connection = JsonConnection(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S))
        except OSError as error:
            raise UserError(
                f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address[0]}:{address[1]} ({error}); "
                "allow connections between the machines on all ports"
            ) from error
        self._connection.send(token=token, rank=rank, where=f"process {os.getpid()} on {socket.gethostname()}")
        self._address = address
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run_thread, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat of a rank that finished without error. The other ranks continue."""
        self._stopping.set()
        self._connection.send(bye=True)
        self._waker.send(b".")
        self._thread.join(timeout=EXIT_TIMEOUT_S)
        self._connection.sock.close()
        if self.registry is not None:
            self.registry.stop()

    def report_failure(self, reason: str, *, is_secondary: bool) -> Fault | None:
        """Report an error of the main thread. Returns the fault that ends the run, or None if no fault arrives in time.

        is_secondary: whether communication with other ranks failed. Another rank is then assumed to be the cause.
        """
        self._main_waits.set()
        self._send_beat()  # the latest progress
        self._connection.send(failed=reason, secondary=is_secondary)
        has_ended = self._run_ended.wait(self._silent_s + EXIT_TIMEOUT_S)
        if self.registry is not None:
            self.registry.wait_for_end()
        return self._fault if has_ended else None

    def _run_thread(self) -> None:
        heard_at_s = last_s = time.monotonic()
        while not self._stopping.is_set():
            self._send_beat()
            readable = wait_readable([self._connection.sock, self._wake], BEAT_INTERVAL_S)
            if self._stopping.is_set():
                return
            now_s = time.monotonic()
            heard_at_s += max(0.0, now_s - last_s - 2 * BEAT_INTERVAL_S)  # exclude the time the job was suspended
            last_s = now_s
            messages = self._connection.receive() if self._connection.sock in readable else []
            if messages:
                heard_at_s = now_s
            if messages is None:
                self._end_run(self._rank_0_fault("its connection closed"))
                return
            if any("bye" in message for message in messages):  # rank 0 has finished
                self._run_ended.set()
                self._connection.sock.close()
                return
            for message in messages:
                if "fault" in message:
                    blamed, text, stuck = message["fault"]
                    self._end_run(Fault(tuple(blamed), str(text), bool(stuck)))
                    return
            if now_s - heard_at_s > self._silent_s:
                self._end_run(self._rank_0_fault(f"no sign of life for {now_s - heard_at_s:.0f} s"))
                return

    def _send_beat(self) -> None:
        self._connection.send(beat=LIVENESS.num_started, signs=LIVENESS.num_advances, doing=LIVENESS.operation)

    def _rank_0_fault(self, reason: str) -> Fault:
        return Fault((0,), f"rank 0 ({self._address[0]}) is gone: {reason}")

    def _end_run(self, fault: Fault) -> None:
        # Ends the process if the main thread or `on_end` hangs.
        last_resort = threading.Timer(EXIT_TIMEOUT_S + FLUSH_TIMEOUT_S, self._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        self._fault = fault
        self._run_ended.set()
        self._connection.sock.close()
        if fault.stuck and self.rank in fault.ranks:
            faulthandler.dump_traceback(2, all_threads=True)  # show where this rank hangs
        if not self._main_waits.is_set():
            try:
                self._on_end(fault.text)
            except Exception:  # noqa: BLE001, the process must exit whatever fails (e.g. a full disk)
                traceback.print_exc()
            if self.registry is not None:
                self.registry.wait_for_end()
            self._exit(1)
        elif not self._stopping.wait(EXIT_TIMEOUT_S):
            self._exit(1)
        last_resort.cancel()


def start_heartbeat(
    world: Any, *, stuck_s: float, on_end: Callable[[str], None], exit_process: Callable[[int], object] = os._exit
) -> Heartbeat | None:
    """Start this rank's heartbeat. All ranks must call this. Returns None if there is only one rank.

    stuck_s: end the run if no rank makes progress for this many seconds. Raises UserError on all ranks if any rank
    cannot reach rank 0.
    """
    if world.size == 1:
        return None
    launched = find_launched_rank(os.environ)
    assert launched is not None  # World.join sets the variables
    host = launched.master_addr
    states = RankStates(world.size, silent_s=SILENCE_TIMEOUT_S, stuck_s=stuck_s, max_gap_s=2 * BEAT_INTERVAL_S)
    # A machine may resolve its own name to an address that other machines cannot reach (127.0.1.1 on Debian).
    everywhere = world.size > ranks_per_node(world.size)
    registry = RankRegistry(states, None if everywhere else host) if world.is_main else None
    port, token = world.broadcast([registry.port, registry.token] if registry is not None else None)
    heartbeats: list[Heartbeat] = []

    def connect() -> None:
        heartbeats.append(
            Heartbeat((host, port), token, world.rank, on_end=on_end, registry=registry, exit_process=exit_process)
        )

    try:
        world.run_checked(connect)
    except UserError:  # raised on all ranks; stop the heartbeat, so that it does not report another cause
        if heartbeats:
            heartbeats[0].stop()
        elif registry is not None:
            registry.stop()
        raise
    return heartbeats[0]


def is_communication_error(error: BaseException | None) -> bool:
    """Return whether communication with other ranks failed."""
    import torch.distributed as dist

    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer")):
            return True
        error = error.__cause__
    return False
