"""A client's submissions, kept until all their tasks have ended. Decides when to send each submission."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.transport import wire
from wfm_ds.transport.wire import Buffer, TensorSpec

RESUBMIT_INTERVAL_S = 2.0  # between sends of an unaccepted submission
FULL_RETRY_S = 1.0  # before resending to a full broker
MAX_IN_FLIGHT = 4  # submissions sent but not accepted; the rest waits here, not in a socket


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """A task: rows [start, stop) of a submission, for one worker of `kind`.

    Tasks with equal ids are treated as the same task.
    """

    id: str
    kind: str
    start: int
    stop: int
    deadline_s: float  # on the clock of PipeClient.now_s; afterwards the broker drops the task


@dataclass(slots=True)
class Submission:
    """Rows, their tensors, and the tasks that refer to these rows."""

    rows: Sequence[Mapping[str, Any]]
    specs: list[TensorSpec]
    frames: list[Buffer]
    open_tasks: dict[str, TaskRequest]  # tasks without an outcome
    unaccepted_ids: set[str] = field(default_factory=set)
    retry_at_s: float = float("-inf")

    def encode_header(self, mid: int, now_s: float) -> bytes:
        """Return the header of message `mid` with the tasks that the broker has not accepted yet."""
        tasks = [
            {"id": t.id, "kind": t.kind, "start": t.start, "stop": t.stop, "deadline_s": max(0.0, t.deadline_s - now_s)}
            for t in self.open_tasks.values()
            if t.id in self.unaccepted_ids
        ]
        return wire.encode_header("submit", mid, {"rows": list(self.rows), "tasks": tasks}, self.specs)


class PendingSubmissions:
    """A client's submissions in order, with an index by task id. Uses no clock and no sockets."""

    def __init__(self) -> None:
        self._submissions: list[Submission] = []
        self._submission_by_task: dict[str, Submission] = {}

    def add(self, submission: Submission) -> None:
        self._submissions.append(submission)
        self._submission_by_task.update(dict.fromkeys(submission.open_tasks, submission))

    def task_ids(self) -> list[str]:
        return list(self._submission_by_task)

    def due_submissions(self, now_s: float) -> Iterator[Submission]:
        """Yield the submissions to send now.

        Only the first MAX_IN_FLIGHT submissions that the broker has not accepted are considered.
        """
        in_flight = 0
        for submission in self._submissions:
            if not submission.unaccepted_ids:
                continue
            if now_s >= submission.retry_at_s:
                yield submission
            in_flight += 1
            if in_flight >= MAX_IN_FLIGHT:
                return

    def mark_accepted(self, ids: Iterable[str]) -> None:
        for task_id in ids:
            if task_id in self._submission_by_task:
                self._submission_by_task[task_id].unaccepted_ids.discard(task_id)

    def retry_later(self, task_id: str, now_s: float) -> None:
        """Send this task again after FULL_RETRY_S, because the broker is full."""
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
