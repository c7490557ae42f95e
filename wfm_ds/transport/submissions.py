"""Unfinished work of a client: its submissions and payload requests. Uses no clock and no sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.transport.wire import Buffer, TensorSpec

RESUBMIT_INTERVAL_S = 2.0  # between sends of an unaccepted submission
FULL_RETRY_S = 1.0  # before resending to a full broker
MAX_IN_FLIGHT = 4  # submissions sent but not accepted; the rest waits here, not in a socket
MARKER_INTERVAL_S = 5.0  # between markers
MAX_OPEN_REQUESTS = 4  # concurrent payload requests

SendMessage = Callable[[str, Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Rows [start, stop) of the submitted rows for one worker of `kind`. Tasks with equal ids are the same task."""

    id: str
    kind: str
    start: int
    stop: int
    deadline_s: float  # on the clock of PipeClient.now_s; afterwards the broker drops the task
    failure: str | None = None  # why `submit_rows` could not send it; such a task has no outcome


@dataclass(slots=True)
class Submission:
    """Rows (one per sample) with tensors, and their tasks. first_row: the number that tasks use for the first row."""

    rows: Sequence[Mapping[str, Any]]
    first_row: int
    specs: list[TensorSpec]
    frames: list[Buffer]
    open_tasks: dict[str, TaskRequest]  # tasks without an outcome
    unaccepted_ids: set[str] = field(default_factory=set)
    retry_at_s: float = float("-inf")


class PendingSubmissions:
    """A client's submissions in order. A submission stays until all its tasks have ended."""

    def __init__(self) -> None:
        self._submissions: list[Submission] = []
        self._submission_by_task: dict[str, Submission] = {}

    def add(self, submission: Submission) -> None:
        self._submissions.append(submission)
        self._submission_by_task.update(dict.fromkeys(submission.open_tasks, submission))

    def task_ids(self) -> list[str]:
        return list(self._submission_by_task)

    def due_submissions(self, now_s: float) -> Iterator[Submission]:
        """Yield the submissions to send now, from the first MAX_IN_FLIGHT unaccepted submissions."""
        unaccepted = (submission for submission in self._submissions if submission.unaccepted_ids)
        for submission in itertools.islice(unaccepted, MAX_IN_FLIGHT):
            if now_s >= submission.retry_at_s:
                yield submission

    def mark_accepted(self, ids: Iterable[str]) -> None:
        for task_id in ids:
            if task_id in self._submission_by_task:
                self._submission_by_task[task_id].unaccepted_ids.discard(task_id)

    def retry_later(self, task_id: str, now_s: float) -> None:
        """Send this task again after FULL_RETRY_S seconds, because the broker is full."""
        if task_id in self._submission_by_task:
            self._submission_by_task[task_id].retry_at_s = now_s + FULL_RETRY_S

    def resend_all(self) -> None:
        """Send all submissions again immediately, because the broker is a new one."""
        for submission in self._submissions:
            submission.unaccepted_ids = set(submission.open_tasks)
            submission.retry_at_s = float("-inf")

    def drop_task(self, task_id: str) -> bool:
        """Remove a task. Returns False if it is unknown, for example if its outcome arrived twice."""
        submission = self._submission_by_task.pop(task_id, None)
        if submission is None:
            return False
        del submission.open_tasks[task_id]
        submission.unaccepted_ids.discard(task_id)
        if not submission.open_tasks:
            self._submissions.remove(submission)
        return True


@dataclass(slots=True)
class PayloadRequest:
    """A request that the broker answers with a `payload` or `missing` message."""

    type: str
    fields: Mapping[str, Any]
    marker: int | None = None  # first marker sent after the request; None: the request must be sent (again)


class PayloadRequests:
    """Requests that have no reply yet, in order of creation. Not thread-safe.

    The broker replies in order on each connection. After requests, the client sends *markers*: `release` messages with
    the id of a nonexistent task, which always get a reply. If a marker gets a reply before an earlier request does, the
    request or its reply was lost.
    """

    def __init__(self, name: str) -> None:
        """name: prefix of this client's marker ids. Task ids must not start with it."""
        self._prefix = f"{name}/"
        self._open: dict[str, PayloadRequest] = {}  # by the id of the expected payload
        self._next_marker = 0
        self._marker_sent_s = float("-inf")

    def add(self, requests: Mapping[str, PayloadRequest]) -> None:
        self._open.update(requests)

    def close(self, key: str) -> bool:
        """Remove a request that was answered or cancelled. Returns True if it was open."""
        return self._open.pop(key, None) is not None

    def send(self, now_s: float, send: SendMessage) -> None:
        """Send new requests and, while some are open, a marker every MARKER_INTERVAL_S.

        send: function (type, fields) that returns False if it could not send the message.
        """
        for request in itertools.islice(self._open.values(), MAX_OPEN_REQUESTS):
            if request.marker is None and send(request.type, request.fields):
                request.marker = self._next_marker
        marker = {"ids": [f"{self._prefix}{self._next_marker}"]}
        if self._open and now_s - self._marker_sent_s > MARKER_INTERVAL_S and send("release", marker):
            self._next_marker, self._marker_sent_s = self._next_marker + 1, now_s

    def on_released(self, ids: Iterable[str]) -> None:
        """Handle a `released` reply. If it replies to a marker, earlier requests without a reply will be sent again."""
        markers = [i.removeprefix(self._prefix) for i in ids if i.startswith(self._prefix)]
        last = max((int(marker) for marker in markers if marker.isdecimal()), default=-1)
        for request in self._open.values():
            if request.marker is not None and request.marker <= last:
                request.marker = None
