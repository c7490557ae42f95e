"""A worker's side: one thread talks to the hub, the caller's thread does the tasks, one after the other.

A result is kept until the hub acknowledges it. Progress comes only from inside the task: the talking thread repeats the
last mark, so that a task which hangs is seen to hang although this thread answers.
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
HELLO_S = 0.1  # between attempts to be welcomed
RESEND_S = 5.0  # an unacknowledged result
ARM_S = 2.0  # how often the watchdog is told that the interpreter's lock still goes round
EXIT_HUNG = 3  # the exit status of a worker that gave itself up

Progress: TypeAlias = Callable[[int, int], None]
"""Call it with (done, total), done growing, from inside a task or a batch of them."""


class TaskFailed(Exception):
    """A task cannot be done. `fatal`: another attempt would fail alike."""

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
        """The values that the hub's owner had announced when the task was leased."""
        note: Mapping[str, Any] = self.message.fields["note"]
        return note

    def tensors(self) -> list[Array]:
        """Aligned copies, one per row, or none. Raises TaskFailed if they were damaged on the way."""
        try:
            return self.message.tensors()
        except WireError as error:
            raise TaskFailed(str(error), fatal=False) from error


@dataclass(frozen=True, slots=True)
class Answer:
    """A result with tensors, which stay with the hub until the submitter releases them."""

    meta: Mapping[str, Any]
    tensors: Sequence[tuple[str, Array]]


Handle: TypeAlias = Callable[[TaskInHand, Progress], "Mapping[str, Any] | Answer"]
HandleBatch: TypeAlias = Callable[[Sequence[TaskInHand], Progress], "Sequence[Mapping[str, Any] | Answer | TaskFailed]"]
"""One answer for each task, in order."""


@dataclass(slots=True)
class _Report:
    """A result or a failure that the hub has not acknowledged."""

    type: str
    fields: Mapping[str, Any]
    specs: Sequence[TensorSpec] = ()
    frames: Sequence[Buffer] = ()
    sent_at_s: float = float("-inf")


class LeaseWorker:
    """`run` in the thread that computes; it returns when the parent's pipe is closed or `stop` was called."""

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
        """`keys`: for a hub whose workers need some. `parent_fd`: the read end of a pipe, whose end of file means that
        nobody wants the work any more.

        `watchdog_s`: a task that keeps the interpreter's lock this long ends the process; nothing else could.
        `ends_process`: so does a task that is still running when the worker is to stop; False: the caller waits for
        `left` and ends it.
        """
        life = uuid.uuid4().hex
        self._hello = {"worker": worker, "life": life, "name": name, "kinds": kinds, "credit": credit}
        self._endpoint, self._keys = endpoint, keys
        self._parent_fd = parent_fd
        self._watchdog_s, self._ends_process = watchdog_s, ends_process
        self._tasks: queue.SimpleQueue[TaskInHand | None] = queue.SimpleQueue()
        self._news: Mailbox[_Report | None] = Mailbox()  # None: there is new progress
        self._reports: dict[str, _Report] = {}
        self._queued: dict[str, int] = {}  # the attempts that are held: arrived, not reported yet
        self._next: TaskInHand | None = None  # arrived, but too large for the batch that was being gathered
        self._running: frozenset[str] = frozenset()
        self._marks: list[tuple[TaskInHand, int, int]] = []  # (task, done, total) of those that run
        self._mids = itertools.count(1)
        self._drops = Throttle(log.warning)
        self._hub = ""
        self._trouble = ""  # why the hub does not want this worker, as logged last
        self._hello_s = HELLO_S
        self._beat_s = 2.0
        self._stopping = threading.Event()
        self._main_done = threading.Event()
        self._broken = False  # a task has ended the loop
        self.left = threading.Event()  # nothing is sent any more; the hub was told, if it was there

    def run(self, handle: Handle) -> None:
        """Do tasks until told to stop. An exception of `handle` becomes a failure of that task; the loop goes on."""
        self.run_batches(lambda tasks, progress: [handle(task, progress) for task in tasks], max_rows=1, max_wait_s=0.0)

    def run_batches(self, handle: HandleBatch, *, max_rows: int, max_wait_s: float) -> None:
        """The same with all tasks at once that arrive within `max_wait_s` of the first and together have at most
        `max_rows` rows; the first may have more. An exception of `handle` is a failure of all of them."""
        talker = threading.Thread(target=self._talk, name="pipes", daemon=True)
        talker.start()
        try:
            while batch := self._gathered(max_rows, max_wait_s):
                self._do(batch, handle)
        except BaseException:  # sys.exit in a task: who just left would be given the task again, for ever
            self._broken = True
            raise
        finally:
            self._main_done.set()
            self.stop()
            talker.join(10)

    def stop(self) -> None:
        self._stopping.set()
        self._news.put(None)

    def _gathered(self, max_rows: int, max_wait_s: float) -> list[TaskInHand]:
        """The next tasks to do; none when told to stop."""
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
                continue  # cancelled meanwhile, or sent again
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
            answers = handle(batch, lambda done, total: self._progress(batch, done, total))
            seconds = (time.monotonic() - started) / max(1, sum(len(task.rows) for task in batch))
            answered = list(zip(batch, answers, strict=True))
            reports = [_report(t.id, self._attempt(t), answer, seconds * len(t.rows)) for t, answer in answered]
        except Exception as error:  # noqa: BLE001  (the border of the worker's loop: it becomes a named failure)
            reports = [_report(task.id, self._attempt(task), error, 0.0) for task in batch]
        self._running, self._marks = frozenset(), []
        for report in reports:
            self._news.put(report)

    def _progress(self, batch: Sequence[TaskInHand], done: int, total: int) -> None:
        self._marks = [(task, done, total) for task in batch]
        self._news.put(None)

    def _attempt(self, task: TaskInHand) -> int:
        """The lease under which the hub knows it: a later one than it came with, if it was leased here again."""
        return self._queued.get(task.id, task.attempt)

    # The talking thread

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
                new_mark = self._take_news()
                while (frames := dealer.receive()) is not None:
                    self._from_hub(frames, now_s)
                if not self._hub and now_s - hello_at_s > self._hello_s:
                    hello_at_s = now_s
                    held = sorted(self._queued.keys() | self._reports.keys())
                    self._send(dealer, "hello", {**self._hello, "held": held})
                if self._hub and (new_mark or now_s - beat_at_s > self._beat_s):
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
                os._exit(0)  # busy with a task that nobody wants any more

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
        """Take what the main thread has put; True if there is new progress. Reports are kept until acknowledged."""
        new_mark = False
        for report in self._news.take():
            if report is None:
                new_mark = bool(self._marks)
            else:
                self._queued.pop(report.fields["id"], None)
                self._reports[report.fields["id"]] = report
        return new_mark

    def _from_hub(self, frames: list[zmq.Frame], now_s: float) -> None:
        try:
            message = wire.decode([frame.buffer for frame in frames], HUB_TO_WORKER)
        except WireError as error:
            self._drops.tell(error.reason, f"dropped a message of the hub: {error}", now_s)
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
            log.info("the hub says: %s", fields["why"])
            self._stopping.set()
        elif message.type == "cancel":
            for task_id in self._queued.keys() & set(fields["ids"]) - self._running:
                self._give_up(task_id, self._queued[task_id], f"cancelled: {fields['why']}")
        elif message.type == "stalled":
            self._stalled(fields["id"], fields["attempt"])
        else:
            self._hello_s = RESEND_S  # it may be about a hello, and be repeated
            if fields["why"] != self._trouble:
                log.warning("the hub rejected a message: %s", fields["why"])
            self._trouble = fields["why"]

    def _take(self, task: TaskInHand) -> None:
        """Keep a task to do it, unless it is in hand: then the hub had lost this worker, and leases the same again."""
        told, held = self._reports.get(task.id), self._queued.get(task.id)
        if told is not None and told.type == "failed" and told.fields["attempt"] < task.attempt:
            del self._reports[task.id]  # the hub has heard of it: this is another try
        elif told is not None:
            return  # the hub is about to hear of it
        self._queued[task.id] = task.attempt  # the hub listens to no earlier one
        if held != task.attempt and task.id not in self._running:
            self._tasks.put(task)

    def _stalled(self, task_id: str, attempt: int) -> None:
        if task_id in self._reports or self._queued.get(task_id, attempt) != attempt:
            return  # it is over
        if task_id in self._running:
            hung = ", ".join(sorted(self._running))
            log.error("%s hangs: this worker ends, its supervisor starts another. Stacks:", hung)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            os._exit(EXIT_HUNG)  # a thread that hangs cannot be stopped in any other way
        self._give_up(task_id, attempt, "it was not begun" if task_id in self._queued else "it did not arrive")

    def _give_up(self, task_id: str, attempt: int, why: str) -> None:
        """Report a task as failed that was not begun."""
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


def _report(task_id: str, attempt: int, answer: Mapping[str, Any] | Answer | Exception, seconds: float) -> _Report:
    """The report of a task to the hub. Never raises: a result that cannot be sent is a failure."""
    about = {"id": task_id, "attempt": attempt}
    if not isinstance(answer, Exception):
        try:
            meta, tensors = (answer.meta, answer.tensors) if isinstance(answer, Answer) else (answer, ())
            size = wire.packed_size(meta)
            if size > META_BYTES:
                raise TaskFailed(f"a result of {size} bytes, {META_BYTES} are allowed", fatal=True)
            specs, frames = wire.pack_tensors(tensors)
            fields = {**about, "seconds": seconds, "meta": meta}
            wire.encode("result", 0, fields, specs)  # raises for what cannot be sent
            return _Report("result", fields, specs, list(itertools.chain(*frames)))
        except (WireError, TaskFailed) as error:
            answer = error
    return _Report("failed", {**about, **_failure(answer)})


def _remaining(until_s: float) -> float | None:
    """Seconds, None if there is no end."""
    return None if until_s == float("inf") else max(0.0, until_s - time.monotonic())


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, TaskFailed):
        return {"reason": _text(str(error), REASON_CHARS), "detail": "", "fatal": error.fatal}
    detail = "".join(traceback.format_exception(error))[-DETAIL_CHARS:]
    reason = _text(f"{type(error).__name__}: {error}", REASON_CHARS)
    return {"reason": reason, "detail": _text(detail, DETAIL_CHARS), "fatal": False}


def _text(text: str, max_chars: int) -> str:
    """The text as a message can carry it: cut, and without half surrogate pairs."""
    return text[:max_chars].encode(errors="replace").decode()
