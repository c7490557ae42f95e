"""The client: submits tasks to the broker and receives their outcomes. A background thread does all socket work.

Every task ends in exactly one TaskOutcome unless it is cancelled, even if the broker restarts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq

from wfm_ds.chunks import split_into_chunks
from wfm_ds.transport import wire
from wfm_ds.transport.keys import ClientKeys
from wfm_ds.transport.messages import BROKER_TO_CLIENT, MAX_ROWS, MAX_TASKS
from wfm_ds.transport.sockets import (
    ActiveClock,
    Dealer,
    EndpointNotAllowed,
    Mailbox,
    PipeError,
    check_endpoint,
    poll_sockets,
    resolve_endpoint,
)
from wfm_ds.transport.submissions import (
    RESUBMIT_INTERVAL_S,
    PayloadRequest,
    PayloadRequests,
    PendingSubmissions,
    Submission,
    TaskRequest,
)
from wfm_ds.transport.throttle import get_throttled_logger
from wfm_ds.transport.wire import Array, Message, WireError

log = logging.getLogger(__name__)
peer_log = get_throttled_logger(f"{__name__}.peers")

POLL_MS = 100
ATTACH_INTERVAL_S = 0.1  # between attempts to attach; each one looks up the broker's address again
REPORT_DELAY_S = 2.0  # after this time, `attach` logs what it waits for
REJECTION_TIMEOUT_S = 5.0  # `attach` fails early if the broker still rejects the client after this time
SINCE_INTERVAL_S = 2.0  # between `since` messages, which also keep the session alive
RELEASE_RETRY_S = 2.0  # a `release` is repeated until the broker confirms it
IDS_PER_MESSAGE = 100
MAX_MESSAGE_ID = 2**63 - 1
MAX_SUBMISSION_BYTES = 64 * 2**20  # tensor bytes per message of `submit_rows`; a larger row gets its own message


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Result of a task. `meta` is the worker's return value; `reason` explains a failure."""

    id: str
    ok: bool
    seconds: float
    meta: Mapping[str, Any]
    reason: str


class PipeClient:
    """A client of the broker. Call its methods from a single thread; only `close` is thread-safe."""

    def __init__(self, endpoint: str, *, run: str, client: str, keys: ClientKeys | None = None) -> None:
        """Start the background thread. Raises PipeError if the address is not allowed.

        endpoint: an ipc:// or tcp:// address, or the path of a pipes.json file.
        run, client: names that together identify the client. A newer client with the same names replaces an older one.
        keys: key pair of this client; needed if the broker authenticates clients.
        """
        self.endpoint = endpoint if "://" not in endpoint else check_endpoint(endpoint, keys=keys is not None)
        self._keys = keys
        self.kinds: dict[str, dict[str, Any]] = {}  # task kinds offered by the broker; set by `attach`
        self.problem = "not connected yet"  # why the broker does not reply
        self.silence_s = 0.0  # seconds since the last message from the broker
        self._identity = {"run": run, "client": client, "epoch": time.time_ns()}
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._condition = threading.Condition()
        self._outcomes: list[TaskOutcome] = []
        self._stopping = False
        self._rejected_at_s = float("-inf")  # time of the last rejection
        # Used only by the background thread:
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer: Dealer | None = None
        self._session = ""  # while attached
        self._last_session = ""
        self._seq = 0
        self._clock = ActiveClock(time.monotonic())
        self._last_contact_s = self._clock.now_s
        self._submissions = PendingSubmissions()
        self._requests = PayloadRequests(f"mark/{self._identity['epoch']}")
        self._pending_releases: dict[str, float] = {}  # task id -> time of the last `release` message
        self._payloads: dict[str, Message | str] = {}  # payload or the reason it is missing; guarded by self._condition
        self._attach_at_s = self._since_at_s = float("-inf")
        self._thread = threading.Thread(target=self._run_thread, name="pipes", daemon=True)
        self._thread.start()

    def attach(self, timeout_s: float) -> None:
        """Wait for the broker's first reply, which sets `kinds`. Raises PipeError for no reply or rejected keys."""
        refused_s = self.now_s() + min(REJECTION_TIMEOUT_S, timeout_s)

        def has_reply() -> bool:
            return bool(self._last_session) or self._rejected_at_s >= refused_s

        with self._condition:
            if not self._condition.wait_for(has_reply, min(REPORT_DELAY_S, timeout_s)) and timeout_s > REPORT_DELAY_S:
                log.warning("waiting up to %g s for the service: %s", timeout_s, self.problem)
                self._condition.wait_for(has_reply, timeout_s - REPORT_DELAY_S)
            if not self._last_session:
                if self._rejected_at_s >= refused_s:
                    raise PipeError(self.problem)
                fix = "start the service, or correct its address"
                raise PipeError(f"no reply within {timeout_s:g} s: {self.problem}: {fix}")

    def submit(
        self,
        rows: Sequence[Mapping[str, Any]],
        tensors: Sequence[tuple[str, Array]],
        tasks: Sequence[TaskRequest],
        first_row: int = 0,
    ) -> None:
        """Queue `tasks`, which refer to ranges of `rows`, and return immediately.

        tensors: (name, tensor) for each row, or an empty list. Do not modify the tensors until the tasks have ended.
        first_row: the number that the tasks' ranges use for `rows[0]`.
        Raises WireError if rows, tensors and tasks do not fit in one message.
        """
        if len(rows) > MAX_ROWS or len(tasks) > MAX_TASKS:
            raise WireError(f"{len(rows)} rows, {len(tasks)} tasks; limits: {MAX_ROWS}, {MAX_TASKS}")
        specs, frames = wire.pack_tensors(tensors)
        by_id = {task.id: task for task in tasks}
        submission = Submission(rows, first_row, specs, frames, by_id, set(by_id))
        wire.encode_header("submit", MAX_MESSAGE_ID, _submit_fields(submission, self.now_s()), specs)  # checks its size
        self._commands.put(lambda: self._submissions.add(submission))

    def submit_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        tensors: Sequence[Array],
        max_rows: Mapping[str, int],
        new_id: Callable[[str], str],
        deadline_s: float,
    ) -> list[TaskRequest]:
        """Submit all rows to each kind of worker in `max_rows`, in tasks of at most `max_rows[kind]` rows.

        tensors: one per row. Do not modify the tensors until the tasks have ended.
        new_id: function that returns a new task id for a kind.

        If a row is too large for a message, only the tasks with this row fail. Their field `failure` gives the reason.
        """
        tasks: list[TaskRequest] = []
        parts = _split_into_messages([tensor.nbytes for tensor in tensors])
        while parts:
            start, stop = parts.pop(0)
            part = [
                TaskRequest(new_id(kind), kind, at, min(at + limit, stop), deadline_s)
                for kind, limit in max_rows.items()
                for at in range(start, stop, limit)
            ]
            try:
                self.submit(rows[start:stop], [("media", tensor) for tensor in tensors[start:stop]], part, start)
            except WireError as error:
                if stop - start > 1:  # the header is too large
                    half = (start + stop) // 2
                    parts[:0] = [(start, half), (half, stop)]
                    continue
                part = [replace(task, failure=f"cannot be sent: {error}") for task in part]
            tasks += part
        return tasks

    def take_outcomes(self, timeout_s: float) -> list[TaskOutcome]:
        """Return the outcomes since the last call. Waits up to timeout_s for the first one."""
        with self._condition:
            self._condition.wait_for(lambda: self._outcomes, max(0.0, timeout_s))
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel tasks. A cancelled task has no outcome, unless its outcome was already sent."""
        task_ids = list(ids)
        if task_ids:
            self._commands.put(lambda: self._cancel_tasks(task_ids))

    def fetch_results(self, ids: Iterable[str], timeout_s: float) -> dict[str, Message]:
        """Return {task id: result} of this run. Raises PipeError if one is missing or none comes for `timeout_s`."""
        return self._collect_payloads({task_id: PayloadRequest("fetch", {"id": task_id}) for task_id in ids}, timeout_s)

    def read_file(self, name: str, num_bytes: int, timeout_s: float) -> Iterator[Array]:
        """Yield a file of `num_bytes` bytes that the broker offers (`Broker.announce`), as uint8 arrays.

        Raises PipeError if an array takes longer than `timeout_s` seconds.
        """
        for offset in range(0, num_bytes, wire.MAX_FRAME_BYTES):
            key = f"{name}@{offset}"
            request = PayloadRequest("read", {"file": name, "offset": offset})
            yield self._collect_payloads({key: request}, timeout_s)[key].read_tensors()[0]

    def release_results(self, ids: Iterable[str]) -> None:
        """Allow the broker to drop the tensors of these results."""
        never_sent = dict.fromkeys(ids, float("-inf"))
        self._commands.put(lambda: self._pending_releases.update(never_sent))

    def now_s(self) -> float:
        """Return the clock of deadlines: `time.monotonic()` minus the time for which this process was suspended."""
        return self._clock.now_s if self._thread.is_alive() else time.monotonic()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel open tasks and disconnect."""
        self._commands.put(self._detach)
        self._thread.join(timeout_s)

    def _collect_payloads(self, requests: dict[str, PayloadRequest], timeout_s: float) -> dict[str, Message]:
        self._commands.put(lambda: self._requests.add(requests))
        replies: dict[str, Message | str] = {}
        with self._condition:
            while missing := requests.keys() - replies.keys():
                if not self._condition.wait_for(lambda: self._payloads.keys() & requests.keys(), timeout_s):
                    break
                replies |= {key: self._payloads.pop(key) for key in self._payloads.keys() & requests.keys()}
        if missing:
            self._commands.put(lambda: self._drop_requests(requests))
            why = self.problem if self.silence_s > timeout_s else "the broker did not send them"
            raise PipeError(
                f"no payload arrived for {timeout_s:g} s, {len(missing)} missing, e.g. {min(missing)}: {why}"
            )
        if reasons := [reply for reply in replies.values() if isinstance(reply, str)]:
            raise PipeError("; ".join(reasons))
        return {key: reply for key, reply in replies.items() if isinstance(reply, Message)}

    # Methods of the background thread

    def _drop_requests(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._requests.close(key)
            with self._condition:
                self._payloads.pop(key, None)  # arrived too late for the caller

    def _run_thread(self) -> None:
        try:
            while not self._stopping:
                poll_sockets([self._commands, None if self._dealer is None else self._dealer.socket], POLL_MS)
                now_s = self._clock.tick(time.monotonic())
                for command in self._commands.take_all():
                    command()
                while self._dealer and (message := self._dealer.receive_message(BROKER_TO_CLIENT)) is not None:
                    self._handle_message(message, now_s)
                self.silence_s = now_s - self._last_contact_s
                if not self._session:
                    self._try_to_attach(now_s)
                else:
                    self._send_pending(now_s)
        finally:
            if self._dealer is not None:
                self._dealer.close()
            self._context.term()  # bounded by the socket's linger
            self._commands.close()

    def _try_to_attach(self, now_s: float) -> None:
        if now_s - self._attach_at_s < ATTACH_INTERVAL_S:
            return
        self._attach_at_s = now_s
        try:
            endpoint = resolve_endpoint(self.endpoint, keys=self._keys is not None)
        except EndpointNotAllowed as error:
            self._record_rejection(str(error), now_s)
            return
        except PipeError as error:
            self.problem = str(error)
            return
        refusal = self._dealer.connection_problem() if self._dealer is not None else ""
        if self._dealer is None or self._dealer.endpoint != endpoint or self._dealer.is_stale():
            if self._dealer is not None:
                self._dealer.close()
            self._dealer = Dealer(self._context, endpoint, self._keys)
        was_sent = self._send("attach", self._identity)
        if refusal:
            self._record_rejection(f"{endpoint}: {refusal}", now_s)
        elif self._dealer.is_settled() or not self.problem.startswith(f"{endpoint}: "):
            self.problem = f"{endpoint} does not reply" if was_sent else f"nothing listens at {endpoint}"

    def _record_rejection(self, why: str, now_s: float) -> None:
        with self._condition:
            self.problem, self._rejected_at_s = why, now_s
            self._condition.notify_all()

    def _send_pending(self, now_s: float) -> None:
        for submission in self._submissions.due_submissions(now_s):
            if not self._send("submit", _submit_fields(submission, now_s), submission.specs, submission.frames):
                return
            submission.retry_at_s = now_s + RESUBMIT_INTERVAL_S
        self._resend_releases(now_s)  # before the requests: a released result cannot be fetched
        self._requests.send(now_s, self._send)
        if now_s - self._since_at_s > SINCE_INTERVAL_S and self._send("since", {"seq": self._seq}):
            self._since_at_s = now_s

    def _handle_message(self, message: Message, now_s: float) -> None:
        self._last_contact_s = now_s
        fields = message.fields
        if message.type == "attached":
            self._on_attached(fields)
        elif message.type == "who":
            self._session = ""
        elif message.type == "accepted":
            self._on_accepted(fields, now_s)
        elif message.type == "finished":
            for item in fields["items"]:
                self._finish_task(TaskOutcome(item["id"], item["ok"], item["seconds"], item["meta"], item["reason"]))
            if fields["items"]:
                if fields["after"] <= self._seq:  # else a message was lost, and the broker resends
                    self._seq = max(self._seq, fields["items"][-1]["seq"])
                self._since_at_s = float("-inf")  # acknowledge immediately: a stopping broker waits for it
        elif message.type in ("payload", "missing"):
            if self._requests.close(fields["id"]):  # else a duplicate
                with self._condition:
                    self._payloads[fields["id"]] = message if message.type == "payload" else fields["why"]
                    self._condition.notify_all()
        elif message.type == "released":
            self._requests.on_released(fields["ids"])
            for task_id in fields["ids"]:
                self._pending_releases.pop(task_id, None)
        elif not self._session:
            self._record_rejection(fields["why"], now_s)
        else:
            self.problem = fields["why"]
            peer_log.warning("the broker rejected a message: %s", fields["why"])

    def _on_attached(self, fields: Mapping[str, Any]) -> None:
        self._session = fields["session"]
        if self._session != self._last_session:  # the broker was restarted or dropped this client
            self._seq = 0
            self._pending_releases.clear()
            self._submissions.resend_all()
        with self._condition:
            self.kinds, self._last_session = fields["kinds"], self._session
            self._condition.notify_all()

    def _on_accepted(self, fields: Mapping[str, Any], now_s: float) -> None:
        self._submissions.mark_accepted((*fields["ids"], *fields["known"]))
        for task_id, why in fields["refused"]:
            if why == "full":
                self._submissions.retry_later(task_id, now_s)
            else:
                self._finish_task(TaskOutcome(task_id, False, 0.0, {}, f"rejected: {why}"))

    def _finish_task(self, outcome: TaskOutcome) -> None:
        if self._submissions.drop_task(outcome.id):  # else a duplicate
            with self._condition:
                self._outcomes.append(outcome)
                self._condition.notify_all()

    def _cancel_tasks(self, ids: Iterable[str]) -> None:
        dropped = [task_id for task_id in ids if self._submissions.drop_task(task_id)]
        self._send_ids("cancel", dropped, why="cancelled by the client")

    def _resend_releases(self, now_s: float) -> None:  # without a release, the broker keeps the tensors forever
        due = [task_id for task_id, sent_at_s in self._pending_releases.items() if now_s - sent_at_s > RELEASE_RETRY_S]
        for batch in split_into_chunks(due, IDS_PER_MESSAGE):
            if not self._send("release", {"ids": batch}):
                return
            self._pending_releases.update(dict.fromkeys(batch, now_s))

    def _send_ids(self, message_type: str, ids: Sequence[str], **fields: str) -> None:
        for batch in split_into_chunks(ids, IDS_PER_MESSAGE):
            self._send(message_type, {"ids": list(batch), **fields})

    def _detach(self) -> None:
        self._cancel_tasks(self._submissions.task_ids())
        self._send_ids("release", list(self._pending_releases))
        self._send("since", {"seq": self._seq})
        self._stopping = True

    def _send(self, message_type: str, fields: Mapping[str, Any], *tensors: Any) -> bool:
        """Send a message. tensors: their table and frames, if any."""
        if self._dealer is not None and self._dealer.send_message(message_type, fields, *tensors):
            return True
        self._session = ""  # a full queue can mean that the broker was replaced: attach again
        return False


def _submit_fields(submission: Submission, now_s: float) -> dict[str, Any]:
    """Return the fields of a `submit` message with the tasks that the broker has not accepted yet."""
    tasks = []
    for t in submission.open_tasks.values():
        if t.id in submission.unaccepted_ids:
            rows = {"start": t.start - submission.first_row, "stop": t.stop - submission.first_row}
            tasks.append({"id": t.id, "kind": t.kind, **rows, "deadline_s": max(0.0, t.deadline_s - now_s)})
    return {"rows": list(submission.rows), "tasks": tasks}


def _split_into_messages(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges (start, stop) of rows per message. sizes: bytes of each row's tensor."""
    parts, start, total = [], 0, 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= MAX_ROWS or total + size > MAX_SUBMISSION_BYTES):
            parts.append((start, at))
            start, total = at, 0
        total += size
    return [*parts, (start, len(sizes))] if sizes else []
