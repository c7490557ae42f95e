"""The worker: a background thread communicates with the broker, the caller's thread runs the tasks sequentially.

Results are kept until the broker acknowledges them. Only the task itself reports progress; the background thread
repeats the last value. So the broker detects a hanging task even though this thread keeps replying.
"""

from __future__ import annotations

import faulthandler
import itertools
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

from wfm_ds.pipes import wire
from wfm_ds.pipes.keys import ClientKeys
from wfm_ds.pipes.messages import DETAIL_CHARS, HUB_TO_WORKER, META_BYTES, REASON_CHARS
from wfm_ds.pipes.sockets import Dealer, Full, Mailbox
from wfm_ds.pipes.throttle import Throttle
from wfm_ds.pipes.wire import Array, Buffer, Message, TensorSpec, WireError

log = logging.getLogger(__name__)

POLL_MS = 100
HELLO_S = 0.1  # between `hello` messages until `welcome`
RESEND_S = 5.0  # before resending an unacknowledged result
ARM_S = 2.0  # between resets of the watchdog, which fires if the GIL is blocked
EXIT_HUNG = 3  # exit code of a worker with a hanging task

Progress: TypeAlias = Callable[[int, int], None]
"""Called as report(done, total) from inside a task or batch, with increasing `done`."""


class TaskFailed(Exception):
    """A task failed. `fatal`: another attempt would fail the same way."""

    def __init__(self, reason: str, *, fatal: bool) -> None:
        super().__init__(reason)
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class TaskInHand:
    id: str
    attempt: int
    kind: str
    rows: list[dict[str, Any]]
    message: Message

    @property
    def note(self) -> Mapping[str, Any]:
        """Return the values announced by the broker's owner when the task was leased."""
        announcement: Mapping[str, Any] = self.message.fields["note"]
        return announcement

    def tensors(self) -> list[Array]:
        """Return aligned copies of the tensors, one per row or none. Raises TaskFailed if a checksum is wrong."""
        try:
            return self.message.tensors()
        except WireError as error:
            raise TaskFailed(str(error), fatal=False) from error


@dataclass(frozen=True, slots=True)
class Answer:
    """A result with tensors, which the broker keeps until the submitter releases them."""

    meta: Mapping[str, Any]
    tensors: Sequence[tuple[str, Array]]


Handle: TypeAlias = Callable[[TaskInHand, Progress], "Mapping[str, Any] | Answer"]
HandleBatch: TypeAlias = Callable[[Sequence[TaskInHand], Progress], "Sequence[Mapping[str, Any] | Answer | TaskFailed]"]
"""Returns one result per task, in order."""


@dataclass(slots=True)
class _Report:
    """A result or failure not yet acknowledged by the broker."""

    type: str
    fields: Mapping[str, Any]
    specs: Sequence[TensorSpec] = ()
    frames: Sequence[Buffer] = ()
    sent_at_s: float = float("-inf")


class LeaseWorker:
    """Leases tasks from a broker and runs them in the calling thread, until `stop` or the parent's pipe closes."""

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
        """Create a worker; `run` or `run_batches` connects it.

        keys: needed if the broker authenticates workers.
        parent_fd: read end of a pipe. End of file means that the parent is gone and the worker stops.
        watchdog_s: the process exits if a task blocks the GIL for this long.
        ends_process: exit the process if a task is still running when the worker stops. False: the caller waits for
        `disconnected` and exits.
        """
        life = uuid.uuid4().hex
        self._hello = {"worker": worker, "life": life, "name": name, "kinds": kinds, "credit": credit}
        self._endpoint, self._keys = endpoint, keys
        self._parent_fd = parent_fd
        self._watchdog_s, self._ends_process = watchdog_s, ends_process
        self._tasks: queue.SimpleQueue[TaskInHand | None] = queue.SimpleQueue()
        self._news: Mailbox[_Report | None] = Mailbox()  # None: new progress
        self._reports: dict[str, _Report] = {}
        self._queued: dict[str, int] = {}  # task id -> attempt, for tasks received and not reported
        self._next: TaskInHand | None = None  # received, but did not fit in the last batch
        self._running: frozenset[str] = frozenset()
        self._marks: list[tuple[TaskInHand, int, int]] = []  # (task, done, total) of running tasks
        self._mids = itertools.count(1)
        self._drops = Throttle(log.warning)
        self._hub = ""
        self._trouble = ""  # last logged reason for a rejection
        self._hello_s = HELLO_S
        self._beat_s = 2.0
        self._stopping = threading.Event()
        self._main_done = threading.Event()
        self._broken = False  # an exception such as SystemExit left the loop
        self.left = threading.Event()  # set after the worker has left the broker and closed its socket

    def run(self, handle: Handle) -> None:
        """Run tasks one by one until stopped. An exception in `handle` fails only that task."""
        self.run_batches(lambda tasks, progress: [handle(task, progress) for task in tasks], max_rows=1, max_wait_s=0.0)

    def run_batches(self, handle: HandleBatch, *, max_rows: int, max_wait_s: float) -> None:
        """Run tasks in batches until stopped.

        A batch contains the tasks that arrive within `max_wait_s` of the first and have at most `max_rows` rows in
        total; a single larger task is allowed. An exception in `handle` fails all tasks of the batch.
        """
        thread = threading.Thread(target=self._talk, name="pipes", daemon=True)
        thread.start()
        try:
            while batch := self._gathered(max_rows, max_wait_s):
                self._do(batch, handle)
        except BaseException:  # e.g. sys.exit: do not send `leave`, which would requeue the task without an attempt
            self._broken = True
            raise
        finally:
            self._main_done.set()
            self.stop()
            thread.join(10)

    def stop(self) -> None:
        self._stopping.set()
        self._news.put(None)

    def _gathered(self, max_rows: int, max_wait_s: float) -> list[TaskInHand]:
        """Return the next batch of tasks, [] when stopped."""
        batch: list[TaskInHand] = []
        rows, wait_until_s = 0, float("inf")
        while rows < max_rows:
            try:
                task = self._next or self._tasks.get(timeout=_remaining(wait_until_s))
            except queue.Empty:
                break
            self._next = None
            if task is None:
                if batch:
                    self._tasks.put(None)  # for the next call
                return batch
            if self._queued.get(task.id) != task.attempt:
                continue  # cancelled or leased again in the meantime
            if batch and rows + len(task.rows) > max_rows:
                self._next = task
                break
            if not batch:
                wait_until_s = time.monotonic() + max_wait_s
            batch.append(task)
            rows += max(1, len(task.rows))
        return batch

    def _do(self, batch: Sequence[TaskInHand], handle: HandleBatch) -> None:
        self._running = frozenset(task.id for task in batch)
        started = time.monotonic()
        try:
            results = handle(batch, lambda done, total: self._progress(batch, done, total))
            seconds = (time.monotonic() - started) / max(1, sum(len(task.rows) for task in batch))
            pairs = list(zip(batch, results, strict=True))
            reports = [_report(t.id, self._attempt(t), result, seconds * len(t.rows)) for t, result in pairs]
        except Exception as error:  # noqa: BLE001  (top level of the worker's loop: reported as a failure)
            reports = [_report(task.id, self._attempt(task), error, 0.0) for task in batch]
        self._running, self._marks = frozenset(), []
        for report in reports:
            self._news.put(report)

    def _progress(self, batch: Sequence[TaskInHand], done: int, total: int) -> None:
        self._marks = [(task, done, total) for task in batch]
        self._news.put(None)

    def _attempt(self, task: TaskInHand) -> int:
        """Return the latest lease number of the task, which may have been leased to this worker again."""
        return self._queued.get(task.id, task.attempt)

    # Methods of the background thread

    def _talk(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        dealer = Dealer(context, self._endpoint, self._keys)
        try:
            hello_at_s = beat_at_s = armed_at_s = float("-inf")
            while not self._stopping.is_set():
                if self._parent_is_gone(self._readable(dealer)):
                    break
                now_s = time.monotonic()
                self._drops.look(now_s)
                if dealer.stale():
                    dealer = self._reopened(context, dealer)
                if now_s - armed_at_s > ARM_S:
                    armed_at_s = now_s
                    faulthandler.dump_traceback_later(self._watchdog_s, exit=True)
                has_progress = self._take_news()
                while (frames := dealer.receive()) is not None:
                    self._from_hub(frames, now_s)
                if not self._hub and now_s - hello_at_s > self._hello_s:
                    hello_at_s = now_s
                    held = sorted(self._queued.keys() | self._reports.keys())
                    self._send(dealer, "hello", {**self._hello, "held": held})
                if self._hub and (has_progress or now_s - beat_at_s > self._beat_s):
                    beat_at_s = now_s
                    progress = [(task.id, self._attempt(task), done, total) for task, done, total in self._marks]
                    self._send(dealer, "beat", {"progress": progress})
                self._send_reports(dealer, now_s)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._hub and not self._broken:
                self._send(dealer, "leave", {"why": "its worker left"})
            dealer.close()
            context.term()
            self.left.set()
            self._tasks.put(None)
            if self._ends_process and not self._main_done.wait(1.0):
                os._exit(0)  # still running a task that is no longer needed

    def _readable(self, dealer: Dealer) -> Mapping[Any, int]:
        poller = zmq.Poller()
        for source in (dealer.socket, self._news.fileno(), self._parent_fd):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        return dict(poller.poll(POLL_MS))

    def _reopened(self, context: zmq.Context[Any], dealer: Dealer) -> Dealer:
        if (why := dealer.trouble()) != self._trouble:
            log.warning("%s: %s", self._endpoint, why)
        self._hub, self._trouble = "", why
        dealer.close()
        return Dealer(context, self._endpoint, self._keys)

    def _parent_is_gone(self, readable: Mapping[Any, int]) -> bool:
        return self._parent_fd is not None and self._parent_fd in readable and not os.read(self._parent_fd, 4096)

    def _take_news(self) -> bool:
        """Move reports from the mailbox to self._reports. Returns True if there is new progress."""
        has_progress = False
        for report in self._news.take():
            if report is None:
                has_progress = bool(self._marks)
            else:
                self._queued.pop(report.fields["id"], None)
                self._reports[report.fields["id"]] = report
        return has_progress

    def _from_hub(self, frames: list[zmq.Frame], now_s: float) -> None:
        try:
            message = wire.decode([frame.buffer for frame in frames], HUB_TO_WORKER)
        except WireError as error:
            self._drops.tell(error.reason, f"dropped a message from the broker: {error}", now_s)
            return
        fields = message.fields
        if message.type == "welcome":
            if fields["hub"] != self._hub:
                self._hub, self._beat_s = fields["hub"], fields["beat_s"]
                self._trouble, self._hello_s = "", HELLO_S
                for report in self._reports.values():
                    report.sent_at_s = float("-inf")
        elif message.type == "who":
            self._hub = ""
        elif message.type == "task":
            self._take(TaskInHand(fields["id"], fields["attempt"], fields["kind"], fields["rows"], message))
        elif message.type == "ack":
            for task_id in fields["ids"]:
                self._reports.pop(task_id, None)
        elif message.type == "bye":
            log.info("stopped by the broker: %s", fields["why"])
            self._stopping.set()
        elif message.type == "cancel":
            for task_id in self._queued.keys() & set(fields["ids"]) - self._running:
                self._give_up(task_id, self._queued[task_id], f"cancelled: {fields['why']}")
        elif message.type == "stalled":
            self._stalled(fields["id"], fields["attempt"])
        else:
            self._hello_s = RESEND_S  # possibly a rejected hello: slow down
            if fields["why"] != self._trouble:
                log.warning("the broker rejected a message: %s", fields["why"])
            self._trouble = fields["why"]

    def _take(self, task: TaskInHand) -> None:
        """Queue a task. If this worker already has it, the broker had lost the worker and leased the task again."""
        report, attempt = self._reports.get(task.id), self._queued.get(task.id)
        if report is not None and report.type == "failed" and report.fields["attempt"] < task.attempt:
            del self._reports[task.id]  # the broker has received the failure: this is another attempt
        elif report is not None:
            return  # the report will be sent
        self._queued[task.id] = task.attempt  # the broker ignores reports of earlier leases
        if attempt != task.attempt and task.id not in self._running:
            self._tasks.put(task)

    def _stalled(self, task_id: str, attempt: int) -> None:
        if task_id in self._reports or self._queued.get(task_id, attempt) != attempt:
            return  # already finished, or leased again
        if task_id in self._running:
            hanging = ", ".join(sorted(self._running))
            log.error("%s hangs: this worker exits and its supervisor restarts it. Stack traces:", hanging)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            os._exit(EXIT_HUNG)  # a hanging thread cannot be stopped otherwise
        self._give_up(task_id, attempt, "not started" if task_id in self._queued else "not received")

    def _give_up(self, task_id: str, attempt: int, why: str) -> None:
        """Report a task that was not started as failed."""
        self._queued.pop(task_id, None)
        failure = {"reason": _text(why, REASON_CHARS), "detail": "", "fatal": False}
        self._news.put(_Report("failed", {"id": task_id, "attempt": attempt, **failure}))

    def _send_reports(self, dealer: Dealer, now_s: float) -> None:
        for report in self._reports.values() if self._hub else ():
            if now_s - report.sent_at_s > RESEND_S and self._send(
                dealer, report.type, report.fields, report.specs, report.frames
            ):
                report.sent_at_s = now_s

    def _send(
        self,
        dealer: Dealer,
        message_type: str,
        fields: Mapping[str, Any],
        specs: Sequence[TensorSpec] = (),
        frames: Sequence[Buffer] = (),
    ) -> bool:
        try:
            dealer.send(wire.encode(message_type, next(self._mids), fields, specs), frames)
        except Full:
            return False
        return True


def _report(task_id: str, attempt: int, result: Mapping[str, Any] | Answer | Exception, seconds: float) -> _Report:
    """Return the report of a task. Never raises: a result that cannot be sent becomes a failure."""
    lease = {"id": task_id, "attempt": attempt}
    if not isinstance(result, Exception):
        try:
            meta, tensors = (result.meta, result.tensors) if isinstance(result, Answer) else (result, ())
            size = wire.packed_size(meta)
            if size > META_BYTES:
                raise TaskFailed(f"result too large: {size} bytes, limit {META_BYTES}", fatal=True)
            specs, frames = wire.pack_tensors(tensors)
            fields = {**lease, "seconds": seconds, "meta": meta}
            wire.encode("result", 0, fields, specs)  # raises if it cannot be sent
            return _Report("result", fields, specs, list(itertools.chain(*frames)))
        except (WireError, TaskFailed) as error:
            result = error
    return _Report("failed", {**lease, **_failure(result)})


def _remaining(until_s: float) -> float | None:
    """Return the seconds until then, None if it is infinite."""
    return None if until_s == float("inf") else max(0.0, until_s - time.monotonic())


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, TaskFailed):
        return {"reason": _text(str(error), REASON_CHARS), "detail": "", "fatal": error.fatal}
    detail = "".join(traceback.format_exception(error))[-DETAIL_CHARS:]
    reason = _text(f"{type(error).__name__}: {error}", REASON_CHARS)
    return {"reason": reason, "detail": _text(detail, DETAIL_CHARS), "fatal": False}


def _text(text: str, max_chars: int) -> str:
    """Return the text truncated and without unpaired surrogates, as messages require."""
    return text[:max_chars].encode(errors="replace").decode()
