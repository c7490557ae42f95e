"""Each rank tells rank 0 every few seconds that it lives and how far it is; a missing rank ends the run by name.

Without it a dead rank on another machine shows as a broken or endless exchange on all others, and neither says whose
fault it was. A thread of rank 0 keeps the state of each rank (fault.py); a thread of every rank, of rank 0 too, beats
over TCP. A killed process closes its connection and is known at once; a stopped one, or a machine that lost power,
after SILENT_S. The fault goes to all ranks, and each ends with exit code 1.

It listens on a free port, and believes only peers that bring the token which the ranks got over their own group. On one
machine it listens on the address of rank 0 that the launcher gave (MASTER_ADDR); for several on all addresses, since a
machine may know itself under one that no other reaches (Debian has its own name as 127.0.1.1 in /etc/hosts).
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
from collections.abc import Callable, Iterator
from typing import Any

from wfm_ds.distributed.fault import Fault, RankStates
from wfm_ds.distributed.liveness import LIVENESS, Liveness
from wfm_ds.errors import UserError

log = logging.getLogger(__name__)

BEAT_S = 5.0
SILENT_S = 45.0  # a swapping machine is not dead, and a dead run should end within a minute
CONNECT_S = 60.0
LOOK_S = 0.5  # how often rank 0 looks at the states
FLUSH_S = 10.0  # for the fault to reach all ranks before rank 0 goes
EXIT_S = 20.0  # for the main thread to end by itself once it knows the fault
MAX_LINE = 1 << 16


class Line:
    """JSON objects over a connected socket, one a line. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(None)
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, **message: Any) -> bool:
        """False if the connection is broken, or if the peer has read nothing for so long that no line fits."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n", socket.MSG_DONTWAIT)
            return True
        return False

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come, [] for a part of one; None once the peer has closed, or writes nonsense. Call
        it when the socket can be read."""
        try:
            chunk = self.sock.recv(MAX_LINE)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        nonsense = len(self._rest) > MAX_LINE or not all(isinstance(message, dict) for message in messages)
        return None if nonsense or not chunk else messages

    def close(self) -> None:
        self.sock.close()


class RankRegistry:
    """Rank 0's side: a thread that receives from all ranks, finds the fault, and sends it to them."""

    def __init__(self, states: RankStates, host: str, *, everywhere: bool = False) -> None:
        """everywhere: listen on all addresses, not on this one alone."""
        self.token = secrets.token_hex(16)
        self._states = states
        self._lines: dict[int, Line] = {}  # by rank
        self._unknown: list[Line] = []  # connected, no token yet
        self._stopping = threading.Event()
        self._server = listen_everywhere() if everywhere else listen(host)
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="rank-states", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a run that ended well here, and tell the ranks that are still connected."""
        self._stopping.set()
        self._thread.join(timeout=FLUSH_S)

    def join(self) -> None:
        """Wait until the fault has been sent."""
        self._thread.join(timeout=FLUSH_S)

    def _serve(self) -> None:
        told_at_s = time.monotonic()
        with self._server:
            while not self._stopping.is_set():
                self._hear(LOOK_S)
                now_s = time.monotonic()
                if (fault := self._states.fault(now_s)) is not None:
                    self._tell(fault=[list(fault.ranks), fault.text, fault.stuck])
                    if not fault.stuck:  # they will not answer
                        for rank in set(fault.ranks) & self._lines.keys():
                            self._lines.pop(rank).close()
                    break
                if now_s - told_at_s >= BEAT_S:
                    self._tell(alive=True)
                    told_at_s = now_s
            else:
                self._tell(bye=True)
            # A socket that is closed with unread bytes resets the connection, and the peer may lose the last line.
            until_s = time.monotonic() + FLUSH_S
            while self._lines and time.monotonic() < until_s:
                self._hear(LOOK_S)
        for line in (*self._lines.values(), *self._unknown):
            line.close()

    def _tell(self, **message: Any) -> None:
        for _, line in sorted(self._lines.items(), reverse=True):  # rank 0's own process ends with its copy
            line.send(**message)

    def _hear(self, timeout_s: float) -> None:
        readable = readable_of([self._server, *self._sockets()], timeout_s)
        if self._server in readable:
            with contextlib.suppress(OSError):  # it may have gone again
                self._unknown.append(Line(self._server.accept()[0]))
        for rank, line in list(self._lines.items()):
            if line.sock in readable:
                self._attend(rank, line)
        # Last: a rank that is admitted has been read from, and another read might wait for ever.
        for line in [line for line in self._unknown if line.sock in readable]:
            self._welcome(line)

    def _sockets(self) -> Iterator[socket.socket]:
        yield from (line.sock for line in (*self._unknown, *self._lines.values()))

    def _welcome(self, line: Line) -> None:
        """Admit a rank whose first line holds the token."""
        self._unknown.remove(line)
        first = line.receive()
        rank = known_rank(first, self.token, self._states.size)
        if rank is None or first is None:
            line.close()
            return
        self._lines[rank] = line
        self._states.joined(rank, str(first[0].get("where")), time.monotonic())
        self._take(rank, first[1:])

    def _attend(self, rank: int, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            self._states.gone(rank, "its connection closed", time.monotonic())
            self._lines.pop(rank).close()
        else:
            self._take(rank, messages)

    def _take(self, rank: int, messages: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        for message in messages:
            if "beat" in message:
                num_begun, num_advances = int(message["beat"]), int(message["signs"])
                self._states.beat(rank, num_begun, num_advances, str(message.get("doing")), now_s)
            elif "failed" in message:
                self._states.failed(rank, str(message["failed"]), bool(message.get("secondary")), now_s)
            elif "bye" in message:
                self._states.done(rank)


def listen(host: str) -> socket.socket:
    """Listen on a free port of this address, or of all where it is not this machine's own (address translation)."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        log.warning("heartbeat: cannot listen on %s (%s), so on all addresses of this machine", host, error)
        return listen_everywhere()


def listen_everywhere() -> socket.socket:
    """Listen on a free port of all addresses. The token shuts out all but the ranks."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def readable_of(sockets: list[socket.socket], timeout_s: float) -> set[socket.socket]:
    """Return the sockets that can be read, once there are any. Not select(), which takes descriptors below 1024
    alone."""
    poll = select.poll()
    by_number = {sock.fileno(): sock for sock in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(1000 * timeout_s)}


def known_rank(messages: list[dict[str, Any]] | None, token: str, size: int) -> int | None:
    """The rank that a first line names, if it brings the token."""
    if not messages or not hmac.compare_digest(str(messages[0].get("token")), token):
        return None
    rank = messages[0].get("rank")
    return rank if type(rank) is int and 0 <= rank < size else None


class Heartbeat:
    """This rank's side: a thread that beats, receives the fault, and ends the process."""

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        rank: int,
        *,
        on_end: Callable[[str], None],
        registry: RankRegistry | None = None,
        liveness: Liveness = LIVENESS,
        exit_process: Callable[[int], object] = os._exit,
        silent_s: float = SILENT_S,
    ) -> None:
        """Connects; UserError if rank 0 cannot be reached. on_end: called with the fault before the process ends,
        unless the main thread waits for it. registry: on rank 0."""
        self.rank, self.registry, self._liveness, self._silent_s = rank, registry, liveness, silent_s
        self._on_end, self._exit = on_end, exit_process
        self._stopping, self._decided, self._main_waits = threading.Event(), threading.Event(), threading.Event()
        self._fault: Fault | None = None
        try:
            self._line = Line(socket.create_connection(address, timeout=CONNECT_S))
        except OSError as error:
            raise UserError(
                f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address[0]}:{address[1]} ({error}); "
                "the machines of a run must reach each other on all ports"
            ) from error
        self._line.send(token=token, rank=rank, where=f"process {os.getpid()} on {socket.gethostname()}")
        self._address = address
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the heartbeat of a rank that ends without error; the others are not told to end."""
        self._stopping.set()
        self._line.send(bye=True)
        self._waker.send(b".")
        self._thread.join(timeout=EXIT_S)
        self._line.close()
        if self.registry is not None:
            self.registry.stop()

    def failed(self, reason: str, *, is_secondary: bool) -> Fault | None:
        """Report an error of the main thread, and return the fault that ends the run; None if none comes in time.

        is_secondary: an exchange with other ranks broke, so that another rank is likely to be the cause.
        """
        self._main_waits.set()
        self._beat()  # how far it came
        self._line.send(failed=reason, secondary=is_secondary)
        known = self._decided.wait(self._silent_s + EXIT_S)
        if self.registry is not None:
            self.registry.join()
        return self._fault if known else None

    def _run(self) -> None:
        heard_at_s = last_s = time.monotonic()
        while not self._stopping.is_set():
            self._beat()
            readable = readable_of([self._line.sock, self._wake], BEAT_S)
            if self._stopping.is_set():
                return
            now_s = time.monotonic()
            heard_at_s += max(0.0, now_s - last_s - 2 * BEAT_S)  # this process slept: the job was suspended
            last_s = now_s
            messages = self._line.receive() if self._line.sock in readable else []
            if messages:
                heard_at_s = now_s
            if messages is None:
                self._end(self._without_rank_0("its connection closed"))
                return
            if any("bye" in message for message in messages):  # rank 0 has finished
                self._decided.set()
                self._line.close()
                return
            for message in messages:
                if "fault" in message:
                    blamed, text, stuck = message["fault"]
                    self._end(Fault(tuple(blamed), str(text), bool(stuck)))
                    return
            if now_s - heard_at_s > self._silent_s:
                self._end(self._without_rank_0(f"no sign of life for {now_s - heard_at_s:.0f} s"))
                return

    def _beat(self) -> None:
        """Send the state of this rank. A broken line shows in receive."""
        liveness = self._liveness
        self._line.send(beat=liveness.num_begun, signs=liveness.num_advances, doing=liveness.doing)

    def _without_rank_0(self, reason: str) -> Fault:
        return Fault((0,), f"rank 0 ({self._address[0]}) is gone: {reason}")

    def _end(self, fault: Fault) -> None:
        """Let the main thread end the process if it waits for that, else do it: it may hang for ever, and so may what
        on_end writes to."""
        last_resort = threading.Timer(EXIT_S + FLUSH_S, self._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        self._fault = fault
        self._decided.set()
        self._line.close()
        if fault.stuck and self.rank in fault.ranks:
            faulthandler.dump_traceback(2, all_threads=True)  # where this rank hangs
        if not self._main_waits.is_set():
            try:
                self._on_end(fault.text)
            except Exception:  # noqa: BLE001, whatever it is (a full disk, say), the process has to end
                traceback.print_exc()
            if self.registry is not None:
                self.registry.join()
            self._exit(1)
        elif not self._stopping.wait(EXIT_S):
            self._exit(1)
        last_resort.cancel()


def start(
    world: Any, *, stuck_s: float, on_end: Callable[[str], None], exit_process: Callable[[int], object] = os._exit
) -> Heartbeat | None:
    """Start this rank's heartbeat; None for a rank alone. Collective. stuck_s: the run ends if no rank advances for it.

    Raises UserError on all ranks if one of them cannot reach rank 0.
    """
    from wfm_ds.distributed.world import ranks_per_node

    if world.size == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    states = RankStates(world.size, silent_s=SILENT_S, stuck_s=stuck_s, awake_s=2 * BEAT_S)
    everywhere = world.size > ranks_per_node(world.size)
    registry = RankRegistry(states, host, everywhere=everywhere) if world.is_main else None
    port, token = world.broadcast([registry.port, registry.token] if registry is not None else None)
    started: list[Heartbeat] = []

    def join() -> None:
        started.append(
            Heartbeat((host, port), token, world.rank, on_end=on_end, registry=registry, exit_process=exit_process)
        )

    try:
        world.checked(join)
    except UserError:  # of some rank: an end of all, which no heartbeat shall name otherwise
        if started:
            started[0].stop()
        elif registry is not None:
            registry.stop()
        raise
    return started[0]


def is_broken_exchange(error: BaseException | None) -> bool:
    """Return whether an error says that an exchange with other ranks failed: then another rank is likely to be the
    cause."""
    import torch.distributed as dist

    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer")):
            return True
        error = error.__cause__
    return False
