"""The broker: a thread that queues the tasks of clients and leases them to workers, over two ROUTER sockets.

The broker keeps everything in memory. After a crash, clients resubmit their unfinished tasks.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from wfm_ds.transport.broker_clients import BrokerClients
from wfm_ds.transport.broker_workers import BrokerWorkers
from wfm_ds.transport.keys import BrokerKeys
from wfm_ds.transport.ledger import Ledger
from wfm_ds.transport.messages import CLIENT_TO_BROKER, WORKER_TO_BROKER
from wfm_ds.transport.sockets import ActiveClock, Mailbox, MessagePort, poll_sockets, start_authenticator
from wfm_ds.transport.spool import Spool
from wfm_ds.transport.tasks import BrokerStatus, Completion, FinishedTask, Task, TaskPayload

log = logging.getLogger(__name__)

POLL_MS = 200  # upper limit for the delay of stall and deadline checks


@dataclass(frozen=True, slots=True)
class TaskKind:
    """Scheduling limits of a kind of task, and the information that clients receive about this kind."""

    stall_s: float  # a task without progress for this long goes to another worker
    info: Mapping[str, Any]  # plain values, sent to clients in `attached`
    max_waiting: int | None = None  # maximum number of waiting tasks of this kind; None: only the overall limit


class Broker:
    """Queues tasks and leases them to workers, between `start` and `stop`. Thread-safe."""

    def __init__(
        self,
        *,
        clients: str,
        workers: str,
        kinds: Mapping[str, TaskKind],
        max_waiting: int = 20000,
        max_bytes: int = 2**32,
        observer: Callable[[FinishedTask], None] = lambda task: None,
        keys: BrokerKeys | None = None,
        worker_keys: bool = False,
        on_stall: Callable[[str], None] = lambda worker: None,
        worker_timeout_s: float | None = None,
    ) -> None:
        """Bind the sockets. Raises PipeError if an endpoint cannot be bound.

        clients, workers: endpoints of the two sockets. The port may be 0 or * (any free port).
        observer: called in the broker's thread with every finished task. It must be fast and must not raise.
        on_stall: called in the broker's thread with the id of a worker that seems to hang.
        keys: if set, clients must authenticate with an allowed key. worker_keys: whether workers must authenticate too.
        worker_timeout_s: a worker that sends nothing for this long counts as lost, and its tasks are requeued. None:
        only `report_lost_worker` removes workers.
        """
        self.id = uuid.uuid4().hex
        self.kinds = kinds
        self.rejected: Counter[str] = Counter()
        self.error: Exception | None = None
        self.workers_dismissed = False  # all work is done
        self._observer = observer
        self._ledger = Ledger(
            {name: kind.stall_s for name, kind in kinds.items()},
            max_waiting=max_waiting,
            max_bytes=max_bytes,
            max_waiting_by_kind={name: kind.max_waiting for name, kind in kinds.items() if kind.max_waiting},
            on_end=self._notify_observer,
        )
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._status_requests: deque[Future[BrokerStatus]] = deque()
        self._is_closed = False  # no more replies
        self._context: zmq.Context[Any] = zmq.Context()
        self._clock = ActiveClock(time.monotonic())  # excludes the time this process was suspended
        self._ports: list[MessagePort] = []
        try:
            self._authenticator = None if keys is None else start_authenticator(self._context, keys)
            client_port = self._bind_port(clients, CLIENT_TO_BROKER, keys)
            worker_port = self._bind_port(workers, WORKER_TO_BROKER, keys if worker_keys else None)
        except Exception:
            self._close_sockets()
            raise
        self.client_endpoint, self.worker_endpoint = client_port.endpoint, worker_port.endpoint
        self._spool = Spool()
        self._workers = BrokerWorkers(
            worker_port, self._ledger, self._spool, broker_id=self.id, on_stall=on_stall, timeout_s=worker_timeout_s
        )
        self._clients = BrokerClients(
            client_port,
            self._ledger,
            self._spool,
            kinds={name: dict(kind.info) for name, kind in kinds.items()},
            cancel=self._workers.cancel_task,
        )
        self._stop_at_s: float | None = None
        self._thread = threading.Thread(target=self._run_thread, name="broker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the broker's thread is running. If it failed, the exception is in `error`."""
        return self._thread.is_alive()

    def report_lost_worker(self, worker: str, why: str) -> None:
        """Requeue the tasks of a worker after its process has ended."""
        self._commands.put(lambda: self._workers.drop_worker(worker, why))

    def disable_kind(self, kind: str, why: str) -> None:
        """Fail all current and future tasks of a kind, which has no workers left."""
        self._commands.put(lambda: self._ledger.disable_kind(kind, why))

    def announce(self, announcement: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Attach `announcement` to all tasks leased from now on. files: {name: path} of files that clients may read."""
        self._commands.put(lambda: self._set_announcement(announcement, files))

    def dismiss_workers(self, why: str) -> None:
        self.workers_dismissed = True
        self._commands.put(lambda: self._workers.dismiss_all(why))

    def worker_ids(self) -> list[str]:
        return self._workers.worker_ids()

    def request_status(self) -> Future[BrokerStatus]:
        """Return a future for the broker's status. The future is cancelled if the broker's thread has stopped."""
        future: Future[BrokerStatus] = Future()
        self._status_requests.append(future)
        self._commands.put(self._answer_status_requests)
        if self._is_closed or not self.is_alive():  # check last: closing cancels queued requests
            future.cancel()
        return future

    def stop(self, drain_s: float) -> None:
        """Stop leasing, wait up to `drain_s` seconds for running tasks and their results, then close the sockets."""
        self._commands.put(lambda: self._start_drain(drain_s))
        self._thread.join(drain_s + 10)

    # Methods of the broker's thread

    def _answer_status_requests(self) -> None:
        while self._status_requests:
            future = self._status_requests.popleft()
            if future.set_running_or_notify_cancel():  # else the caller has cancelled it
                kinds, workers = self._ledger.summarize_load(self._clock.now_s)
                clients = self._clients.silence_by_owner(self._clock.now_s)
                counts, rejected = dict(self._ledger.counts), self.rejected.total()
                future.set_result(BrokerStatus(kinds, workers, clients, counts, rejected, self._ledger.held_bytes))

    def _notify_observer(self, task: Task, completion: Completion) -> None:
        payload: TaskPayload = task.payload
        waited_s = max(0.0, self._clock.now_s - payload.submitted_at_s - completion.seconds)
        self._observer(FinishedTask(task.kind, payload.rows, payload.specs, payload.frames, completion, waited_s))

    def _bind_port(self, endpoint: str, expected_types: frozenset[str], keys: BrokerKeys | None) -> MessagePort:
        self._ports.append(MessagePort(self._context, endpoint, keys, expected_types, self.rejected))
        return self._ports[-1]

    def _run_thread(self) -> None:
        try:
            while not self._is_drained():
                poll_sockets([*(port.socket for port in self._ports), self._commands], POLL_MS)
                self._run_once(self._clock.tick(time.monotonic()))
        except Exception as error:  # last resort: the owner reads `error`
            log.exception("the broker failed")
            self.error = error
        finally:
            self._close_sockets()

    def _run_once(self, now_s: float) -> None:
        self._workers.receive_messages(now_s)  # first, so that the last result of a lost worker still counts
        for command in self._commands.take_all():
            command()
        self._clients.receive_messages(now_s)
        self._workers.drop_silent_workers(now_s)
        self._workers.expire_leases(now_s)
        self._clients.drop_silent_clients(now_s)
        self._workers.lease_tasks(now_s)
        self._clients.send_completions()

    def _set_announcement(self, announcement: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        self._workers.announcement = announcement
        self._spool.announce_files(files)

    def _is_drained(self) -> bool:
        if self._stop_at_s is None:
            return False
        busy = self._ledger.has_leases() or self._ledger.has_completions()
        return not busy or time.monotonic() > self._stop_at_s

    def _start_drain(self, drain_s: float) -> None:
        self._ledger.is_leasing = False
        self._stop_at_s = time.monotonic() + drain_s

    def _close_sockets(self) -> None:
        self._is_closed = True
        while self._status_requests:
            self._status_requests.popleft().cancel()
        for port in self._ports:
            port.close()
        self._commands.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # bounded by the sockets' linger
        for port in self._ports:
            port.remove_files()
