"""Two ROUTERs around a ledger, in a thread of its own: clients submit, workers are leased tasks, clients get results.

The hub holds everything in memory. After a crash the clients submit again what they have not seen finished: the
submitter is the one source of truth. Payload frames are kept as received and forwarded; the hub never opens them.
Results may have tensors too: they stay in the spool until the submitter releases them, for any client of its run.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from wfm_ds.pipes import wire
from wfm_ds.pipes.clock import OwnClock
from wfm_ds.pipes.keys import HubKeys
from wfm_ds.pipes.ledger import Ledger
from wfm_ds.pipes.messages import CLIENT_TO_HUB, META_BYTES, REASON_CHARS, WORKER_TO_HUB
from wfm_ds.pipes.sockets import Full, Mailbox, Router, Unreachable, authenticator, key_of
from wfm_ds.pipes.spool import NotHeld, Spool
from wfm_ds.pipes.status import Ended, HubStatus, ignore
from wfm_ds.pipes.tasks import Admission, Completion, Grant, Refused, Task, Verdict
from wfm_ds.pipes.wire import HEADER_BYTES, Message, TensorSpec, WireError

log = logging.getLogger(__name__)

TICK_MS = 200  # the resolution of stalls and deadlines
BEAT_S = 2.0
SILENT_CLIENT_S = 300.0  # then its tasks are dropped
MESSAGES_PER_TURN = 256  # of one socket, so that neither starves the other
FINISHED_BYTES = HEADER_BYTES - 4096
ANSWERS_PER_MESSAGE = 100  # an id and a reason each: they fit a header


@dataclass(frozen=True, slots=True)
class Kind:
    """What the hub needs to know of a kind of task, and what it tells clients of it."""

    stall_s: float  # a lease without progress for this long is given to another worker
    info: Mapping[str, Any]  # plain values, for `attached`
    max_waiting: int | None = None  # tasks of this kind that may wait; None: as many as the hub lets wait in all


@dataclass(frozen=True, slots=True)
class _Work:
    rows: list[dict[str, Any]]
    specs: tuple[TensorSpec, ...]
    frames: tuple[zmq.Frame, ...]
    submitted_at_s: float


@dataclass(frozen=True, slots=True)
class _Letter:
    task_id: str
    header: bytes
    frames: tuple[zmq.Frame, ...]


@dataclass(slots=True)
class _Worker:
    life: str
    key: str  # whose name it is; "" where workers need none
    route: bytes
    heard_at_s: float
    outbox: deque[_Letter] = field(default_factory=deque)  # tasks that a full pipe refused


@dataclass(slots=True)
class _Client:
    epoch: int
    key: str
    route: bytes
    seen_at_s: float
    session: str = field(default_factory=lambda: uuid.uuid4().hex)  # as long as the hub remembers it
    notified: int = 0  # the last completion sent


class Hub:
    """Bind in the constructor, serve between `start` and `stop`. All public methods may be called from any thread."""

    def __init__(
        self,
        *,
        clients: str,
        workers: str,
        kinds: Mapping[str, Kind],
        max_waiting: int = 20000,
        max_bytes: int = 2**32,
        observer: Callable[[Ended], None] = ignore,
        keys: HubKeys | None = None,
        worker_keys: bool = False,
        on_stall: Callable[[str], None] = lambda worker: None,
        silent_worker_s: float | None = None,
    ) -> None:
        """Endpoints may end in port 0 or *. `observer` is called in the hub's thread with every task that ends: it must
        be quick, and not raise. `on_stall` likewise, with the id of a worker that seems to hang. With `keys` clients
        must have one that they allow, with `worker_keys` workers too. Raises PipeError if an endpoint cannot be bound.

        `silent_worker_s`: a worker that is not heard of for this long is lost, and what it holds is given to others;
        None: its supervisor alone decides. One that comes back is a worker again.
        """
        self.id = uuid.uuid4().hex
        self.kinds = dict(kinds)
        self.rejected: Counter[str] = Counter()
        self.error: Exception | None = None
        self.dismissed = False  # there will be no more work
        self._observer, self._on_stall = observer, on_stall
        self._ledger = Ledger(
            {name: kind.stall_s for name, kind in kinds.items()},
            max_waiting=max_waiting,
            max_bytes=max_bytes,
            max_waiting_of={name: kind.max_waiting for name, kind in kinds.items() if kind.max_waiting is not None},
            on_end=self._observe,
        )
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._context: zmq.Context[Any] = zmq.Context()
        self._routers: list[Router] = []
        try:
            self._authenticator = None if keys is None else authenticator(self._context, keys)
            self._clients = self._bound(clients, keys)
            self._workers = self._bound(workers, keys if worker_keys else None)
        except Exception:
            self._close()
            raise
        self._mids = itertools.count(1)
        self._clock = OwnClock(time.monotonic())  # a hub that was stopped blames nobody for it
        self._owner_of: dict[bytes, str] = {}
        self._attached: dict[str, _Client] = {}
        self._worker_of: dict[bytes, str] = {}
        self._connected: dict[str, _Worker] = {}
        self._silent_worker_s = silent_worker_s
        self._spool = Spool()
        self._note: Mapping[str, Any] = {}
        self._stop_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    @property
    def client_endpoint(self) -> str:
        return self._clients.endpoint

    @property
    def worker_endpoint(self) -> str:
        return self._workers.endpoint

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        """False once it stopped, or died of `error`."""
        return self._thread.is_alive()

    def worker_lost(self, worker: str, why: str) -> None:
        """Its supervisor saw the process end: requeue what it held, now."""
        self._commands.put(lambda: self._lose_worker(worker, why))

    def kind_down(self, kind: str, why: str) -> None:
        """Its supervisor gave up: fail its tasks at once."""
        self._commands.put(lambda: self._ledger.kind_down(kind, why))

    def announce(self, note: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """From here on each task is leased together with this note of plain values, and clients may read these files
        by their names."""
        self._commands.put(lambda: self._announce(note, files))

    def dismiss_workers(self, why: str) -> None:
        """Tell all workers that there will be no more work."""
        self.dismissed = True
        self._commands.put(lambda: self._dismiss(why))

    def workers(self) -> list[str]:
        """The ids of those that are connected, as of a moment ago."""
        return sorted(self._connected)

    def status(self) -> Future[HubStatus]:
        """How things stand, from the hub's own thread within TICK_MS or so. Cancelled if the hub has stopped."""
        answer: Future[HubStatus] = Future()
        self._commands.put(lambda: self._answer(answer))
        if not self.alive():
            answer.cancel()
        return answer

    def stop(self, drain_s: float) -> None:
        """Lease nothing more, wait up to drain_s until what is leased has finished and the clients have it, close.

        A message sent is not one received: zmq drops what a client has not read when the connection goes away.
        Returns when the sockets are closed.
        """
        self._commands.put(lambda: self._begin_stop(drain_s))
        self._thread.join(drain_s + 10)

    # The thread

    def _answer(self, answer: Future[HubStatus]) -> None:
        if answer.set_running_or_notify_cancel():  # else nobody waits for it any more
            answer.set_result(self._census(self._clock.now_s))

    def _census(self, now_s: float) -> HubStatus:
        kinds, workers = self._ledger.census(now_s)
        clients = {owner: now_s - client.seen_at_s for owner, client in self._attached.items()}
        counts, rejected = dict(self._ledger.counts), self.rejected.total()
        return HubStatus(kinds, workers, clients, counts, rejected, self._ledger.held_bytes)

    def _observe(self, task: Task, completion: Completion) -> None:
        work: _Work = task.payload
        waited_s = max(0.0, self._clock.now_s - work.submitted_at_s - completion.seconds)
        self._observer(Ended(task.kind, work.rows, work.specs, work.frames, completion, waited_s))

    def _bound(self, endpoint: str, keys: HubKeys | None = None) -> Router:
        router = Router(self._context, endpoint, keys)
        self._routers.append(router)
        return router

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for readable in (self._clients.socket, self._workers.socket, self._commands.fileno()):
                poller.register(readable, zmq.POLLIN)
            while not self._done():
                poller.poll(TICK_MS)
                self._turn(self._clock.look(time.monotonic()))
        except Exception as error:  # the border of the thread: whoever owns the hub reads `error`
            log.exception("the hub failed")
            self.error = error
        finally:
            self._close()

    def _turn(self, now_s: float) -> None:
        self._receive(self._workers, WORKER_TO_HUB, self._from_worker, now_s)  # before "lost": a last result counts
        for command in self._commands.take():
            command()
        self._receive(self._clients, CLIENT_TO_HUB, self._from_client, now_s)
        self._lose_silent_workers(now_s)
        for worker, task_id, attempt in self._ledger.expire(now_s):
            log.warning("task %s stalled in worker %s", task_id, worker)
            self._on_stall(worker)
            self._to_worker(worker, "stalled", {"id": task_id, "attempt": attempt})
        for owner in [o for o, client in self._attached.items() if now_s - client.seen_at_s > SILENT_CLIENT_S]:
            self._forget(owner)
        for grant in self._ledger.lease(now_s):
            self._queue_task(grant)
        for worker in list(self._connected):
            self._flush(worker)
        for owner, client in self._attached.items():
            self._notify(owner, client)

    def _done(self) -> bool:
        if self._stop_at_s is None:
            return False
        busy = self._ledger.has_leases() or self._ledger.has_completions()
        return not busy or time.monotonic() > self._stop_at_s

    def _begin_stop(self, drain_s: float) -> None:
        self._ledger.leasing = False
        self._stop_at_s = time.monotonic() + drain_s

    def _close(self) -> None:
        for router in self._routers:
            router.close()
        self._commands.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # bounded by the sockets' linger
        for router in self._routers:
            router.release()

    def _receive(
        self,
        router: Router,
        expected: frozenset[str],
        handle: Callable[[bytes, Message, list[zmq.Frame], float], None],
        now_s: float,
    ) -> None:
        for _ in range(MESSAGES_PER_TURN):
            received = router.receive()
            if received is None:
                return
            route, frames = received
            try:
                message = wire.decode([frame.buffer for frame in frames], expected)
                handle(route, message, frames, now_s)
            except WireError as error:
                self.rejected[router.endpoint] += 1
                log.warning("dropped a message at %s: %s", router.endpoint, error)
                self._send(router, route, "reject", {"about": 0, "why": str(error)[:REASON_CHARS]})

    def _send(
        self,
        router: Router,
        route: bytes,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        payload: Sequence[Any] = (),
    ) -> bool:
        """Whether it went out. Everything sent this way is repeated by the protocol if it gets lost."""
        try:
            router.send(route, wire.encode(message_type, next(self._mids), fields, specs), payload)
        except (Unreachable, Full):
            return False
        return True

    # Workers

    def _from_worker(self, route: bytes, message: Message, frames: list[zmq.Frame], now_s: float) -> None:
        fields = message.fields
        if message.type == "hello":
            self._hello(route, key_of(frames[0]), fields, now_s)
            return
        worker = self._worker_of.get(route)
        if worker is None or not self._ledger.knows_worker(worker):
            self._send(self._workers, route, "who", {})
            return
        self._connected[worker].heard_at_s = now_s
        if message.type == "beat":
            for task_id, attempt, done, _ in fields["progress"]:
                self._ledger.progress(worker, task_id, attempt, done, now_s)
        elif message.type == "result":
            size = wire.packed_size(fields["meta"])
            if size > META_BYTES:
                reason = f"a result of {size} bytes, {META_BYTES} are allowed"
                self._ledger.failed(worker, fields["id"], fields["attempt"], reason, fatal=True)
            else:
                self._result(worker, message, frames[1:])
            self._send(self._workers, route, "ack", {"ids": [fields["id"]]})
        elif message.type == "leave":
            for task_id in self._ledger.worker_left(worker):
                log.info("task %s was with a worker that leaves: %s", task_id, fields["why"])
            self._forget_worker(worker)
        else:
            log.warning("worker %s failed at %s: %s\n%s", worker, fields["id"], fields["reason"], fields["detail"])
            self._ledger.failed(worker, fields["id"], fields["attempt"], fields["reason"], fields["fatal"])
            self._send(self._workers, route, "ack", {"ids": [fields["id"]]})

    def _result(self, worker: str, message: Message, payload: list[zmq.Frame]) -> None:
        fields = message.fields
        owner = self._ledger.owner_of(fields["id"])
        verdict = self._ledger.result(worker, fields["id"], fields["attempt"], fields["seconds"], fields["meta"])
        if message.specs and owner is not None and verdict in (Verdict.ACCEPTED, Verdict.LATE):
            self._spool.put(fields["id"], owner, message.specs, payload)

    def _hello(self, route: bytes, key: str, fields: Mapping[str, Any], now_s: float) -> None:
        worker, life = fields["worker"], fields["life"]
        known = self._connected.get(worker)
        if known is not None and known.key != key:
            raise WireError(f"a worker with another key is called {worker}")
        if known is not None and known.life != life:
            self._lose_worker(worker, "its worker died")
            known = None
        if known is None or known.route != route:  # a repeated hello of one route says nothing about what is lost
            self._worker_of.pop(known.route if known is not None else b"", None)
            known = self._connected[worker] = _Worker(life, key, route, now_s)
            self._worker_of[route] = worker
            self._ledger.worker_up(worker, frozenset(fields["kinds"]), fields["credit"], fields["held"])
        known.heard_at_s = now_s
        self._send(self._workers, route, "welcome", {"hub": self.id, "beat_s": BEAT_S})

    def _lose_worker(self, worker: str, why: str) -> None:
        """It died, hangs or cannot be reached: its tasks may be to blame, but for those that were not sent."""
        if worker in self._connected:
            self._ledger.not_sent(worker, [letter.task_id for letter in self._connected[worker].outbox])
        for task_id in self._ledger.worker_lost(worker, why):
            log.warning("task %s was with a worker that is lost: %s", task_id, why)
        self._forget_worker(worker)

    def _forget_worker(self, worker: str) -> None:
        known = self._connected.pop(worker, None)
        if known is not None:
            self._worker_of.pop(known.route, None)

    def _lose_silent_workers(self, now_s: float) -> None:
        limit_s = self._silent_worker_s
        if limit_s is not None:
            for worker in [w for w, known in self._connected.items() if now_s - known.heard_at_s > limit_s]:
                log.warning("worker %s was silent for %g s", worker, limit_s)
                self._lose_worker(worker, f"its worker was silent for {limit_s:g} s")

    def _dismiss(self, why: str) -> None:
        for worker in list(self._connected):
            self._to_worker(worker, "bye", {"why": why})

    def _announce(self, note: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        self._note = note
        self._spool.announce(files)

    def _to_worker(self, worker: str, message_type: str, fields: Mapping[str, Any]) -> None:
        if worker in self._connected:
            self._send(self._workers, self._connected[worker].route, message_type, fields)

    def _queue_task(self, grant: Grant) -> None:
        work: _Work = grant.task.payload
        fields = {"id": grant.task.id, "attempt": grant.attempt, "kind": grant.task.kind, "rows": work.rows}
        fields["note"] = dict(self._note)
        try:
            header = wire.encode("task", next(self._mids), fields, work.specs)
        except WireError as error:  # rows that fitted their submission, but not together with the note
            why = f"cannot be sent: {error}"[:REASON_CHARS]
            self._ledger.failed(grant.worker, grant.task.id, grant.attempt, why, fatal=True)
            return
        self._connected[grant.worker].outbox.append(_Letter(grant.task.id, header, work.frames))

    def _flush(self, worker: str) -> None:
        route, outbox = self._connected[worker].route, self._connected[worker].outbox
        while outbox:
            letter = outbox[0]
            try:
                self._workers.send(route, letter.header, letter.frames)
            except Full:
                return
            except Unreachable:
                self._lose_worker(worker, "the connection was lost")
                return
            outbox.popleft()

    # Clients

    def _from_client(self, route: bytes, message: Message, frames: list[zmq.Frame], now_s: float) -> None:
        fields = message.fields
        if message.type == "attach":
            self._attach(route, key_of(frames[0]), message.mid, fields, now_s)
            return
        owner = self._owner_of.get(route)
        if owner is None:
            self._send(self._clients, route, "who", {})
            return
        self._attached[owner].seen_at_s = now_s
        if message.type == "submit":
            self._submit(route, owner, message, frames[1:], now_s)
        elif message.type == "since":
            self._ledger.release(owner, fields["seq"])
            self._attached[owner].notified = fields["seq"]
            if not self._ledger.completions(owner, fields["seq"]):
                self._send(self._clients, route, "finished", {"after": fields["seq"], "items": []})  # a sign of life
        elif message.type == "fetch":
            self._answer_with(route, fields["id"], lambda: self._spool.result(fields["id"], owner.split("/", 1)[0]))
        elif message.type == "read":
            name, offset = fields["file"], fields["offset"]
            self._answer_with(route, f"{name}@{offset}", lambda: self._spool.piece(name, offset))
        elif message.type == "release":
            self._spool.drop(fields["ids"])
            self._send(self._clients, route, "released", {"ids": fields["ids"]})
        else:
            self._spool.drop(fields["ids"])
            self._cancel_running(self._ledger.cancel(owner, fields["ids"]), fields["why"])

    def _answer_with(
        self, route: bytes, name: str, read: Callable[[], tuple[Sequence[TensorSpec], Sequence[Any]]]
    ) -> None:
        """What was asked for, or why there is none. A full pipe drops it: the client asks again."""
        try:
            specs, payload = read()
        except NotHeld as error:
            self._send(self._clients, route, "missing", {"id": name, "why": str(error)[:REASON_CHARS]})
            return
        self._send(self._clients, route, "payload", {"id": name}, specs, payload)

    def _attach(self, route: bytes, key: str, mid: int, fields: Mapping[str, Any], now_s: float) -> None:
        owner = f"{fields['run']}/{fields['client']}"
        client = self._attached.get(owner)
        why = ""
        if client is not None and client.key != key:
            why = f"a client with another key is called {owner}"
        elif client is not None and fields["epoch"] < client.epoch:
            why = f"a newer client {owner} is attached"
        if why:
            self._send(self._clients, route, "reject", {"about": mid, "why": why[:REASON_CHARS]})
            return
        if client is None or fields["epoch"] > client.epoch:
            self._forget(owner)  # ids return after a resume, perhaps with other media
            client = self._attached[owner] = _Client(fields["epoch"], key, route, now_s)
        self._owner_of.pop(client.route, None)
        self._owner_of[route] = owner
        client.route, client.seen_at_s = route, now_s
        client.notified = 0  # what was sent to its old route may be lost
        kinds = {name: dict(kind.info) for name, kind in self.kinds.items()}
        self._send(self._clients, route, "attached", {"session": client.session, "kinds": kinds})

    def _forget(self, owner: str) -> None:
        self._cancel_running(self._ledger.forget(owner), "its client left")
        self._spool.drop_of(owner)
        client = self._attached.pop(owner, None)
        if client is not None:
            self._owner_of.pop(client.route, None)

    def _cancel_running(self, running: Iterable[tuple[str, str]], why: str) -> None:
        for worker, task_id in running:
            self._to_worker(worker, "cancel", {"ids": [task_id], "why": why})

    def _submit(self, route: bytes, owner: str, message: Message, payload: list[zmq.Frame], now_s: float) -> None:
        rows, tasks = message.fields["rows"], message.fields["tasks"]
        if len(message.specs) not in (0, len(rows)) or not all(t["start"] < t["stop"] <= len(rows) for t in tasks):
            raise WireError("submit: its tasks, rows and tensors do not belong together")
        answers: list[tuple[str, str | list[str]]] = []
        frame_at = [0, *itertools.accumulate(spec.num_frames for spec in message.specs)]
        for fields in tasks:
            part = slice(fields["start"], fields["stop"])
            specs = message.specs[part]
            frames = payload[frame_at[part.start] : frame_at[part.stop]] if specs else []
            work = _Work(rows[part], specs, tuple(frames), now_s)
            num_bytes, num_rows = sum(spec.nbytes for spec in specs), part.stop - part.start
            task = Task(fields["id"], owner, fields["kind"], num_bytes, now_s + fields["deadline_s"], work, num_rows)
            try:
                admission = self._ledger.submit(task)
                answers.append(("ids" if admission is Admission.NEW else "known", task.id))
            except Refused as error:
                answers.append(("refused", [task.id, str(error)]))
        for at in range(0, len(answers), ANSWERS_PER_MESSAGE):
            some = answers[at : at + ANSWERS_PER_MESSAGE]
            lists = {key: [a for k, a in some if k == key] for key in ("ids", "known", "refused")}
            self._send(self._clients, route, "accepted", lists)

    def _notify(self, owner: str, client: _Client) -> None:
        """Send what has finished since the last time. A lost message is repeated when the client says `since`."""
        items = self._ledger.completions(owner, client.notified)
        while items:
            batch: list[dict[str, Any]] = []
            size = 0
            for item in items:
                fields = _completion_fields(item)
                size += wire.packed_size(fields)
                if batch and size > FINISHED_BYTES:
                    break
                batch.append(fields)
            if not self._send(self._clients, client.route, "finished", {"after": client.notified, "items": batch}):
                return
            client.notified = batch[-1]["seq"]
            items = items[len(batch) :]


def _completion_fields(item: Completion) -> dict[str, Any]:
    return {name: getattr(item, name) for name in Completion.__slots__}
