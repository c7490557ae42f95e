"""The broker: a thread with two ROUTER sockets around a ledger. Clients submit tasks, workers lease them.

The broker keeps everything in memory. After a crash, clients resubmit their unfinished tasks: the submitter is the
source of truth. Payload frames are forwarded as received and never decoded. Tensors of results stay in the spool until
the submitter releases them; any client of its run can fetch them.
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

from wfm_ds.pipes.clock import OwnClock
from wfm_ds.pipes.hub_clients import Clients
from wfm_ds.pipes.hub_workers import Workers
from wfm_ds.pipes.keys import HubKeys
from wfm_ds.pipes.ledger import Ledger
from wfm_ds.pipes.messages import CLIENT_TO_HUB, WORKER_TO_HUB
from wfm_ds.pipes.port import Port
from wfm_ds.pipes.sockets import Mailbox, Router, authenticator
from wfm_ds.pipes.spool import Spool
from wfm_ds.pipes.status import Ended, HubStatus, ignore
from wfm_ds.pipes.tasks import Completion, Task, TaskPayload

log = logging.getLogger(__name__)

TICK_MS = 200  # upper limit for the delay of stall and deadline checks


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task: scheduling limits, and information for clients."""

    stall_s: float  # a task without progress for this long goes to another worker
    info: Mapping[str, Any]  # plain values, sent to clients in `attached`
    max_waiting: int | None = None  # limit of waiting tasks of this kind; None: only the overall limit


class Hub:
    """Binds in the constructor and serves between `start` and `stop`. Public methods are thread-safe."""

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
        """Bind the sockets. Raises PipeError if an endpoint cannot be bound.

        clients, workers: endpoints; the port may be 0 or *.
        observer: called in the broker's thread with every finished task. It must be fast and must not raise.
        on_stall: called in the broker's thread with the id of a worker that seems to hang; same requirements.
        keys: clients must authenticate with an allowed key; with worker_keys, workers too.
        worker_timeout_s: a worker without messages for this long counts as lost and its tasks are requeued. It may
        reconnect later. None: only `report_lost_worker` removes workers.
        """
        self.id = uuid.uuid4().hex
        self.kinds = kinds
        self.rejected: Counter[str] = Counter()
        self.error: Exception | None = None
        self.dismissed = False  # all work is done
        self._observer = observer
        self._ledger = Ledger(
            {name: kind.stall_s for name, kind in kinds.items()},
            max_waiting=max_waiting,
            max_bytes=max_bytes,
            max_waiting_of={name: kind.max_waiting for name, kind in kinds.items() if kind.max_waiting is not None},
            on_end=self._observe,
        )
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._questions: deque[Future[HubStatus]] = deque()
        self._closed = False  # no more replies
        self._context: zmq.Context[Any] = zmq.Context()
        self._clock = OwnClock(time.monotonic())  # excludes the time this process was suspended
        self._routers: list[Router] = []
        self._ports: list[Port] = []
        try:
            self._authenticator = None if keys is None else authenticator(self._context, keys)
            client_port = self._bound(clients, CLIENT_TO_HUB, keys)
            worker_port = self._bound(workers, WORKER_TO_HUB, keys if worker_keys else None)
        except Exception:
            self._close()
            raise
        self.client_endpoint, self.worker_endpoint = client_port.router.endpoint, worker_port.router.endpoint
        self._spool = Spool()
        self._workers = Workers(
            worker_port,
            self._ledger,
            self._spool,
            hub_id=self.id,
            on_stall=on_stall,
            silent_s=silent_worker_s,
        )
        self._clients = Clients(
            client_port,
            self._ledger,
            self._spool,
            kinds={name: kind.info for name, kind in kinds.items()},
            cancel=self._workers.cancel,
        )
        self._stop_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        """Return False if the broker has stopped, or failed with `error`."""
        return self._thread.is_alive()

    def worker_lost(self, worker: str, why: str) -> None:
        """Requeue the tasks of a worker after its process has ended."""
        self._commands.put(lambda: self._workers.lose(worker, why))

    def kind_down(self, kind: str, why: str) -> None:
        """Fail all current and future tasks of a kind because it has no workers left."""
        self._commands.put(lambda: self._ledger.kind_down(kind, why))

    def announce(self, note: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Attach these plain values to every task leased from now on, and let clients read these files by name."""
        self._commands.put(lambda: self._announce(note, files))

    def dismiss_workers(self, why: str) -> None:
        """Tell all workers to leave because all work is done."""
        self.dismissed = True
        self._commands.put(lambda: self._workers.dismiss(why))

    def workers(self) -> list[str]:
        """Return a recent snapshot of the connected worker ids."""
        return self._workers.ids()

    def status(self) -> Future[HubStatus]:
        """Request the status; the broker's thread replies within about POLL_MS. Cancelled if it has stopped."""
        future: Future[HubStatus] = Future()
        self._questions.append(future)
        self._commands.put(self._answer)
        if self._closed or not self.alive():  # checked last: closing cancels the requests added before
            future.cancel()
        return future

    def stop(self, drain_s: float) -> None:
        """Stop leasing, wait up to drain_s for leased tasks and the delivery of their results, then close the sockets.

        Waits for acknowledgements because zmq drops unread messages when a connection closes. Returns after the
        sockets are closed.
        """
        self._commands.put(lambda: self._begin_stop(drain_s))
        self._thread.join(drain_s + 10)

    # Methods of the broker's thread

    def _answer(self) -> None:
        while self._questions:
            future = self._questions.popleft()
            if future.set_running_or_notify_cancel():  # else the caller has cancelled it
                future.set_result(self._census(self._clock.now_s))

    def _census(self, now_s: float) -> HubStatus:
        kinds, workers = self._ledger.census(now_s)
        clients = self._clients.silences(now_s)
        counts, rejected = dict(self._ledger.counts), self.rejected.total()
        return HubStatus(kinds, workers, clients, counts, rejected, self._ledger.held_bytes)

    def _observe(self, task: Task, completion: Completion) -> None:
        payload: TaskPayload = task.payload
        waited_s = max(0.0, self._clock.now_s - payload.submitted_at_s - completion.seconds)
        self._observer(Ended(task.kind, payload.rows, payload.specs, payload.frames, completion, waited_s))

    def _bound(self, endpoint: str, expected: frozenset[str], keys: HubKeys | None) -> Port:
        router = Router(self._context, endpoint, keys)
        self._routers.append(router)
        self._ports.append(Port(router, expected, self.rejected))
        return self._ports[-1]

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for readable in (*(router.socket for router in self._routers), self._commands.fileno()):
                poller.register(readable, zmq.POLLIN)
            while not self._done():
                poller.poll(TICK_MS)
                self._turn(self._clock.look(time.monotonic()))
        except Exception as error:  # top level of the thread: the owner reads `error`
            log.exception("the broker failed")
            self.error = error
        finally:
            self._close()

    def _turn(self, now_s: float) -> None:
        self._workers.receive(now_s)  # before the commands: the last result of a lost worker counts
        for command in self._commands.take():
            command()
        self._clients.receive(now_s)
        self._workers.lose_silent(now_s)
        self._workers.expire(now_s)
        self._clients.forget_silent(now_s)
        self._workers.lease(now_s)
        self._clients.notify()

    def _announce(self, note: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        self._workers.note = note
        self._spool.announce(files)

    def _done(self) -> bool:
        if self._stop_at_s is None:
            return False
        busy = self._ledger.has_leases() or self._ledger.has_completions()
        return not busy or time.monotonic() > self._stop_at_s

    def _begin_stop(self, drain_s: float) -> None:
        self._ledger.leasing = False
        self._stop_at_s = time.monotonic() + drain_s

    def _close(self) -> None:
        self._closed = True
        for port in self._ports:
            port.close(self._clock.now_s)
        while self._questions:
            self._questions.popleft().cancel()
        for router in self._routers:
            router.close()
        self._commands.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # bounded by the sockets' linger
        for router in self._routers:
            router.release()
