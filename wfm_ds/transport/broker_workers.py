"""The part of the broker that communicates with workers, the processes that run tasks.

Call its methods only in the broker's thread, except for `worker_ids`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.ledger import Ledger
from wfm_ds.transport.messages import META_BYTES, REASON_CHARS
from wfm_ds.transport.sockets import MessagePort, PeerUnreachable, sender_key
from wfm_ds.transport.spool import Spool
from wfm_ds.transport.tasks import LeaseGrant, ReportStatus, TaskPayload
from wfm_ds.transport.wire import Message, WireError

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class _QueuedTask:
    task_id: str
    header: bytes
    frames: tuple[zmq.Frame, ...]


@dataclass(slots=True)
class _WorkerState:
    life: str
    key: str  # public key that owns the worker name; "" without keys
    route: bytes
    last_contact_s: float
    outbox: deque[_QueuedTask] = field(default_factory=deque)  # tasks not sent yet


class BrokerWorkers:
    """The connected workers, indexed by id and by route (zmq routing id)."""

    def __init__(
        self,
        port: MessagePort,
        ledger: Ledger,
        spool: Spool,
        *,
        broker_id: str,
        on_stall: Callable[[str], None],
        timeout_s: float | None,
    ) -> None:
        """on_stall: receives the id of a worker that seems to hang.
        timeout_s: a worker that sends nothing for this long counts as lost. None: no limit.
        """
        self.announcement: Mapping[str, Any] = {}  # sent with each leased task
        self._port, self._ledger, self._spool = port, ledger, spool
        self._broker_id, self._on_stall, self._timeout_s = broker_id, on_stall, timeout_s
        self._workers_by_route: dict[bytes, str] = {}
        self._workers: dict[str, _WorkerState] = {}

    def worker_ids(self) -> list[str]:
        """Return the ids of connected workers. Thread-safe."""
        return sorted(self._workers)

    def receive_messages(self, now_s: float) -> None:
        self._port.receive_messages(self._handle_message, now_s)

    def drop_worker(self, worker: str, why: str) -> None:
        """Requeue the tasks of a lost worker. Each task that was sent to the worker gets a failed attempt."""
        if worker in self._workers:
            self._ledger.requeue_unsent(worker, [task.task_id for task in self._workers[worker].outbox])
        for task_id in self._ledger.remove_lost_worker(worker, why):
            log.warning("task %s was lost with its worker: %s", task_id, why)
        self._remove_worker(worker)

    def drop_silent_workers(self, now_s: float) -> None:
        limit_s = self._timeout_s
        if limit_s is not None:
            for worker in [w for w, state in self._workers.items() if now_s - state.last_contact_s > limit_s]:
                log.warning("worker %s was silent for %g s", worker, limit_s)
                self.drop_worker(worker, f"its worker was silent for {limit_s:g} s")

    def expire_leases(self, now_s: float) -> None:
        """Take stalled tasks from workers, which get `stalled` messages. Waiting tasks fail after their deadline."""
        for worker, task_id, attempt in self._ledger.expire_leases(now_s):
            log.warning("task %s stalled in worker %s", task_id, worker)
            self._on_stall(worker)
            self._send(worker, "stalled", {"id": task_id, "attempt": attempt})

    def lease_tasks(self, now_s: float) -> None:
        for grant in self._ledger.lease_tasks(now_s):
            self._queue_task(grant)
        for worker in list(self._workers):
            self._flush_outbox(worker)

    def cancel_task(self, worker: str, task_id: str, why: str) -> None:
        self._send(worker, "cancel", {"ids": [task_id], "why": why})

    def dismiss_all(self, why: str) -> None:
        for worker in list(self._workers):
            self._send(worker, "bye", {"why": why})

    # Messages from workers

    def _handle_message(self, route: bytes, message: Message, frames: list[zmq.Frame], now_s: float) -> None:
        fields = message.fields
        if message.type == "hello":
            self._on_hello(route, sender_key(frames[0]), fields, now_s)
            return
        worker = self._workers_by_route.get(route)
        if worker is None:
            self._port.send_message(route, "who", {})
            return
        self._workers[worker].last_contact_s = now_s
        if message.type == "beat":
            for task_id, attempt, done, _ in fields["progress"]:
                self._ledger.record_progress(worker, task_id, attempt, done, now_s)
        elif message.type == "result":
            self._on_result(worker, message, frames[1:])
            self._port.send_message(route, "ack", {"ids": [fields["id"]]})
        elif message.type == "leave":
            for task_id in self._ledger.remove_departed_worker(worker):
                log.info("task %s was returned by a leaving worker: %s", task_id, fields["why"])
            self._remove_worker(worker)
        else:
            status = self._ledger.record_failure(
                worker, fields["id"], fields["attempt"], fields["reason"], fields["fatal"]
            )
            if status is ReportStatus.ACCEPTED:  # a peer may repeat the report, or report a task it does not hold
                log.warning("worker %s failed on %s: %s\n%s", worker, fields["id"], fields["reason"], fields["detail"])
            self._port.send_message(route, "ack", {"ids": [fields["id"]]})

    def _on_hello(self, route: bytes, key: str, fields: Mapping[str, Any], now_s: float) -> None:
        worker, life = fields["worker"], fields["life"]
        state = self._workers.get(worker)
        if state is not None and state.key != key:
            raise WireError(f"worker {worker} is already connected with another key")
        if state is not None and state.life != life:
            self.drop_worker(worker, "its worker died")
            state = None
        if state is None or state.route != route:  # a repeated hello on the same route does not mean lost leases
            self._workers_by_route.pop(state.route if state is not None else b"", None)
            state = self._workers[worker] = _WorkerState(life, key, route, now_s)
            self._workers_by_route[route] = worker
            self._ledger.register_worker(worker, frozenset(fields["kinds"]), fields["credit"], fields["held"])
        state.last_contact_s = now_s
        self._port.send_message(route, "welcome", {"hub": self._broker_id, "beat_s": BEAT_INTERVAL_S})

    def _on_result(self, worker: str, message: Message, payload: list[zmq.Frame]) -> None:
        fields = message.fields
        size = len(wire.pack_value(fields["meta"]))
        if size > META_BYTES:
            reason = f"result too large: {size} bytes, limit {META_BYTES}"
            self._ledger.record_failure(worker, fields["id"], fields["attempt"], reason, fatal=True)
            return
        owner = self._ledger.find_owner(fields["id"])
        status = self._ledger.record_result(worker, fields["id"], fields["attempt"], fields["seconds"], fields["meta"])
        if message.specs and owner is not None and status in (ReportStatus.ACCEPTED, ReportStatus.LATE):
            self._spool.put(fields["id"], owner, message.specs, payload)

    def _remove_worker(self, worker: str) -> None:
        state = self._workers.pop(worker, None)
        if state is not None:
            self._workers_by_route.pop(state.route, None)

    # Messages to workers

    def _send(self, worker: str, message_type: str, fields: Mapping[str, Any]) -> None:
        if worker in self._workers:
            self._port.send_message(self._workers[worker].route, message_type, fields)

    def _queue_task(self, grant: LeaseGrant) -> None:
        payload: TaskPayload = grant.task.payload
        fields = {"id": grant.task.id, "attempt": grant.attempt, "kind": grant.task.kind, "rows": payload.rows}
        fields["note"] = dict(self.announcement)
        try:
            header = self._port.encode("task", fields, payload.specs)
        except WireError as error:  # the rows fit in a message, but not together with the announcement
            why = f"cannot be sent: {error}"[:REASON_CHARS]
            self._ledger.record_failure(grant.worker, grant.task.id, grant.attempt, why, fatal=True)
            return
        self._workers[grant.worker].outbox.append(_QueuedTask(grant.task.id, header, payload.frames))

    def _flush_outbox(self, worker: str) -> None:
        route, outbox = self._workers[worker].route, self._workers[worker].outbox
        while outbox:
            task = outbox[0]
            try:
                self._port.send(route, task.header, task.frames)
            except zmq.Again:
                return
            except PeerUnreachable:
                self.drop_worker(worker, "the connection was lost")
                return
            outbox.popleft()
