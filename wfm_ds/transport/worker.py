"""The worker: a background thread communicates with the broker, and the caller's thread runs the tasks in order."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from wfm_ds.errors import describe_error
from wfm_ds.transport import wire
from wfm_ds.transport.keys import ClientKeys
from wfm_ds.transport.messages import BROKER_TO_WORKER, DETAIL_CHARS, META_BYTES, REASON_CHARS
from wfm_ds.transport.sockets import Dealer, Mailbox, poll_sockets
from wfm_ds.transport.wire import Array, Buffer, Message, TensorSpec, WireError

log = logging.getLogger(__name__)

POLL_MS = 100
HELLO_INTERVAL_S = 0.1  # between `hello` messages until `welcome`
RESEND_INTERVAL_S = 5.0  # before resending an unacknowledged result
WATCHDOG_INTERVAL_S = 2.0  # between resets of the watchdog, which fires if the GIL is blocked
HUNG_EXIT_CODE = 3  # exit code of a worker with a hanging task

ReportProgress: TypeAlias = Callable[[int, int], None]
"""Function that tasks call as report(done, total). `done` must increase."""


class TaskFailed(Exception):
    """Raised if a task fails. `fatal` is True if another attempt would fail in the same way."""

    def __init__(self, reason: str, *, fatal: bool) -> None:
        super().__init__(reason)
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class LeasedTask:
    id: str
    attempt: int
    kind: str
    rows: list[dict[str, Any]]
    message: Message

    @property
    def announcement(self) -> Mapping[str, Any]:
        """Return the last announcement (`Broker.announce`) before the broker leased this task."""
        announcement: Mapping[str, Any] = self.message.fields["note"]
        return announcement

    def read_tensors(self) -> list[Array]:
        """Return copies of the task's tensors: one for each element of `rows`, or [] for a task without tensors."""
        return self.message.read_tensors()


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A result with tensors. The broker keeps them until the client that submitted the task releases them."""

    meta: Mapping[str, Any]
    tensors: Sequence[tuple[str, Array]]


TaskHandler: TypeAlias = Callable[[LeasedTask, ReportProgress], "Mapping[str, Any] | TaskResult"]
BatchHandler: TypeAlias = Callable[
    [Sequence[LeasedTask], ReportProgress], "Sequence[Mapping[str, Any] | TaskResult | TaskFailed]"
]
"""Function that runs a batch of tasks and returns one result per task, in order."""


@dataclass(slots=True)
class _PendingReport:
    type: str
    fields: Mapping[str, Any]
    specs: Sequence[TensorSpec] = ()
    frames: Sequence[Buffer] = ()
    sent_at_s: float = float("-inf")


class LeaseWorker:
    """Leases tasks from a broker and runs them in the calling thread, until `stop` or the end of the parent process."""

    def __init__(
        self,
        endpoint: str,
        *,
        worker: str,
        name: str,
        kinds: list[str],
        credit: int = 1,
        keys: ClientKeys | None = None,
        parent_fd: int | None = None,
        watchdog_s: float = 600.0,
        ends_process: bool = True,
    ) -> None:
        """Configure the worker. It connects to the broker in `run` or `run_batches`.

        keys: needed if the broker authenticates workers.
        parent_fd: read end of a pipe from the parent process. The worker stops when the parent closes the pipe.
        watchdog_s: the process exits if a task blocks the GIL for this many seconds.
        ends_process: whether to exit the process if a task is still running when the worker stops. If False, the caller
        must wait for `disconnected` and exit itself.
        """
        life = uuid.uuid4().hex
        self._hello = {"worker": worker, "life": life, "name": name, "kinds": kinds, "credit": credit}
        self._endpoint, self._keys = endpoint, keys
        self._parent_fd = parent_fd
        self._watchdog_s, self._ends_process = watchdog_s, ends_process
        self._tasks: queue.SimpleQueue[LeasedTask | None] = queue.SimpleQueue()
        self._mailbox: Mailbox[_PendingReport | None] = Mailbox()  # None: new progress
        self._reports: dict[str, _PendingReport] = {}
        self._attempts: dict[str, int] = {}  # task id -> attempt, for tasks received and not reported
        self._deferred_task: LeasedTask | None = None  # received, but did not fit in the last batch
        self._running_ids: frozenset[str] = frozenset()
        self._progress_rows: list[tuple[LeasedTask, int, int]] = []  # (task, done, total) of running tasks
        self._broker_id = ""
        self._problem = ""  # last logged reason for a rejection
        self._hello_interval_s = HELLO_INTERVAL_S
        self._beat_interval_s = 2.0
        self._stopping = threading.Event()
        self._main_done = threading.Event()
        self._is_broken = False  # an exception such as SystemExit left the loop
        self.disconnected = threading.Event()  # set after the worker has left the broker and closed its socket

    def run(self, handle: TaskHandler) -> None:
        """Run tasks one by one until stopped. If `handle` raises an exception, only that task fails."""
        self.run_batches(lambda tasks, progress: [handle(task, progress) for task in tasks], max_rows=1, max_wait_s=0.0)

    def run_batches(self, handle: BatchHandler, *, max_rows: int, max_wait_s: float) -> None:
        """Run tasks in batches until stopped. If `handle` raises an exception, all tasks of the batch fail.

        A batch contains the tasks that arrive within `max_wait_s` seconds after the first one. It has at most
        `max_rows` rows, unless a single task has more.
        """
        thread = threading.Thread(target=self._run_thread, name="pipes", daemon=True)
        thread.start()
        try:
            while batch := self._next_batch(max_rows, max_wait_s):
                self._run_batch(batch, handle)
        except BaseException:  # e.g. sys.exit: do not send `leave`, which would requeue the task without an attempt
            self._is_broken = True
            raise
        finally:
            self._main_done.set()
            self.stop()
            thread.join(10)

    def stop(self) -> None:
        self._stopping.set()
        self._mailbox.put(None)

    def _next_batch(self, max_rows: int, max_wait_s: float) -> list[LeasedTask]:
        batch: list[LeasedTask] = []
        rows, wait_until_s = 0, 0.0
        while rows < max_rows:
            try:
                timeout_s = max(0.0, wait_until_s - time.monotonic()) if batch else None
                task = self._deferred_task or self._tasks.get(timeout=timeout_s)
            except queue.Empty:
                break
            self._deferred_task = None
            if task is None:
                if batch:
                    self._tasks.put(None)  # for the next call
                return batch
            if self._attempts.get(task.id) != task.attempt:
                continue  # cancelled or leased again in the meantime
            if batch and rows + len(task.rows) > max_rows:
                self._deferred_task = task
                break
            if not batch:
                wait_until_s = time.monotonic() + max_wait_s
            batch.append(task)
            rows += max(1, len(task.rows))
        return batch

    def _run_batch(self, batch: Sequence[LeasedTask], handle: BatchHandler) -> None:
        def report_progress(done: int, total: int) -> None:
            self._progress_rows = [(task, done, total) for task in batch]
            self._mailbox.put(None)

        self._running_ids = frozenset(task.id for task in batch)
        started = time.monotonic()
        try:
            results = handle(batch, report_progress)
            seconds = (time.monotonic() - started) / max(1, sum(len(task.rows) for task in batch))
            pairs = list(zip(batch, results, strict=True))
            reports = [
                _make_report(t.id, self._current_attempt(t), result, seconds * len(t.rows)) for t, result in pairs
            ]
        except Exception as error:  # noqa: BLE001  (top level of the worker's loop: reported as a failure)
            reports = [_make_report(task.id, self._current_attempt(task), error, 0.0) for task in batch]
        self._running_ids, self._progress_rows = frozenset(), []
        for report in reports:
            self._mailbox.put(report)

    def _current_attempt(self, task: LeasedTask) -> int:
        return self._attempts.get(task.id, task.attempt)

    # Methods of the background thread

    def _run_thread(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        dealer = Dealer(context, self._endpoint, self._keys)
        try:
            hello_at_s = beat_at_s = armed_at_s = float("-inf")
            while not self._stopping.is_set():
                readable = poll_sockets([dealer.socket, self._mailbox, self._parent_fd], POLL_MS)
                if self._parent_fd is not None and self._parent_fd in readable and not os.read(self._parent_fd, 4096):
                    break  # the parent process has ended
                now_s = time.monotonic()
                if dealer.is_stale():
                    dealer = self._reopen_dealer(context, dealer)
                if now_s - armed_at_s > WATCHDOG_INTERVAL_S:
                    armed_at_s = now_s
                    faulthandler.dump_traceback_later(self._watchdog_s, exit=True)
                has_progress = self._take_reports()
                while (message := dealer.receive_message(BROKER_TO_WORKER)) is not None:
                    self._handle_message(message)
                if not self._broker_id and now_s - hello_at_s > self._hello_interval_s:
                    hello_at_s = now_s
                    held = sorted(self._attempts.keys() | self._reports.keys())
                    dealer.send_message("hello", {**self._hello, "held": held})
                if self._broker_id and (has_progress or now_s - beat_at_s > self._beat_interval_s):
                    beat_at_s = now_s
                    progress = [
                        (task.id, self._current_attempt(task), done, total) for task, done, total in self._progress_rows
                    ]
                    dealer.send_message("beat", {"progress": progress})
                self._send_reports(dealer, now_s)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._broker_id and not self._is_broken:
                dealer.send_message("leave", {"why": "its worker left"})
            dealer.close()
            context.term()
            self.disconnected.set()
            self._tasks.put(None)
            if self._ends_process and not self._main_done.wait(1.0):
                os._exit(0)  # the main thread still runs a task that is no longer needed

    def _reopen_dealer(self, context: zmq.Context[Any], dealer: Dealer) -> Dealer:
        if (why := dealer.connection_problem()) != self._problem:
            log.warning("%s: %s", self._endpoint, why)
        self._broker_id, self._problem = "", why
        dealer.close()
        return Dealer(context, self._endpoint, self._keys)

    def _take_reports(self) -> bool:
        has_progress = False
        for report in self._mailbox.take_all():
            if report is None:
                has_progress = bool(self._progress_rows)
            else:
                self._attempts.pop(report.fields["id"], None)
                self._reports[report.fields["id"]] = report
        return has_progress

    def _handle_message(self, message: Message) -> None:
        fields = message.fields
        if message.type == "welcome":
            if fields["hub"] != self._broker_id:
                self._broker_id, self._beat_interval_s = fields["hub"], fields["beat_s"]
                self._problem, self._hello_interval_s = "", HELLO_INTERVAL_S
                for report in self._reports.values():
                    report.sent_at_s = float("-inf")
        elif message.type == "who":
            self._broker_id = ""
        elif message.type == "task":
            self._accept_task(LeasedTask(fields["id"], fields["attempt"], fields["kind"], fields["rows"], message))
        elif message.type == "ack":
            for task_id in fields["ids"]:
                self._reports.pop(task_id, None)
        elif message.type == "bye":
            log.info("stopped by the broker: %s", fields["why"])
            self._stopping.set()
        elif message.type == "cancel":
            for task_id in self._attempts.keys() & set(fields["ids"]) - self._running_ids:
                self._fail_unstarted(task_id, self._attempts[task_id], f"cancelled: {fields['why']}")
        elif message.type == "stalled":
            self._on_stalled(fields["id"], fields["attempt"])
        else:
            self._hello_interval_s = RESEND_INTERVAL_S  # the broker may have rejected `hello`: retry less often
            if fields["why"] != self._problem:
                log.warning("the broker rejected a message: %s", fields["why"])
            self._problem = fields["why"]

    def _accept_task(self, task: LeasedTask) -> None:
        report, attempt = self._reports.get(task.id), self._attempts.get(task.id)
        if report is not None and report.type == "failed" and report.fields["attempt"] < task.attempt:
            del self._reports[task.id]  # the broker has received the failure; this is a new attempt
        elif report is not None:
            return  # the report will be sent
        self._attempts[task.id] = task.attempt  # the broker ignores reports of earlier leases
        if attempt != task.attempt and task.id not in self._running_ids:
            self._tasks.put(task)

    def _on_stalled(self, task_id: str, attempt: int) -> None:
        if task_id in self._reports or self._attempts.get(task_id, attempt) != attempt:
            return  # already finished, or leased again
        if task_id in self._running_ids:
            hanging = ", ".join(sorted(self._running_ids))
            log.error("%s hangs: this worker exits and its supervisor restarts it. Stack traces:", hanging)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            os._exit(HUNG_EXIT_CODE)  # a hanging thread cannot be stopped otherwise
        self._fail_unstarted(task_id, attempt, "not started" if task_id in self._attempts else "not received")

    def _fail_unstarted(self, task_id: str, attempt: int, why: str) -> None:
        self._attempts.pop(task_id, None)
        self._mailbox.put(_make_failure(task_id, attempt, why))

    def _send_reports(self, dealer: Dealer, now_s: float) -> None:
        for report in self._reports.values() if self._broker_id else ():
            if now_s - report.sent_at_s > RESEND_INTERVAL_S and dealer.send_message(
                report.type, report.fields, report.specs, report.frames
            ):
                report.sent_at_s = now_s


def _make_report(
    task_id: str, attempt: int, result: Mapping[str, Any] | TaskResult | Exception, seconds: float
) -> _PendingReport:
    """Return the report of a task. Never raises: if a result cannot be sent, the report says that the task failed."""
    if not isinstance(result, Exception):
        try:
            meta, tensors = (result.meta, result.tensors) if isinstance(result, TaskResult) else (result, ())
            if not isinstance(meta, Mapping):
                raise TaskFailed(f"returned {type(meta).__name__} instead of a map", fatal=True)
            size = len(wire.pack_value(meta))
            if size > META_BYTES:
                raise TaskFailed(f"result too large: {size} bytes, limit {META_BYTES}", fatal=True)
            specs, frames = wire.pack_tensors(tensors)
            fields = {"id": task_id, "attempt": attempt, "seconds": seconds, "meta": meta}
            wire.encode_header("result", 0, fields, specs)  # raises if it cannot be sent
            return _PendingReport("result", fields, specs, frames)
        except (WireError, TaskFailed) as error:
            result = error
    if isinstance(result, TaskFailed):
        return _make_failure(task_id, attempt, str(result), fatal=result.fatal)
    detail = "".join(traceback.format_exception(result))[-DETAIL_CHARS:]
    return _make_failure(task_id, attempt, describe_error(result), detail)


def _make_failure(task_id: str, attempt: int, reason: str, detail: str = "", *, fatal: bool = False) -> _PendingReport:
    reason, detail = (text.encode(errors="replace").decode() for text in (reason[:REASON_CHARS], detail))
    fields = {"id": task_id, "attempt": attempt, "reason": reason, "detail": detail, "fatal": fatal}
    return _PendingReport("failed", fields)
