"""A client's unfinished submissions, and when to send them, until their tasks have ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.pipes import wire
from wfm_ds.pipes.wire import Buffer, TensorSpec

RESUBMIT_S = 2.0  # between sends of an unaccepted submission
FULL_S = 1.0  # before resending to a full broker
MAX_IN_FLIGHT = 4  # submissions sent but not accepted; the rest waits here, not in a socket


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Rows [start, stop) of a submission for one worker of `kind`. Equal ids mean equal work."""

    id: str
    kind: str
    start: int
    stop: int
    deadline_s: float  # on the clock of PipeClient.now_s; afterwards the broker drops the task


@dataclass(slots=True)
class Submission:
    """Rows, their tensors, and the tasks over these rows."""

    rows: Sequence[Mapping[str, Any]]
    specs: list[TensorSpec]
    frames: list[Buffer]
    open: dict[str, TaskRequest]  # tasks without an outcome
    unaccepted: set[str] = field(default_factory=set)
    retry_at_s: float = float("-inf")

    def encode(self, mid: int, now_s: float) -> bytes:
        """Return the header of a message with the unaccepted tasks."""
        tasks = [
            {"id": t.id, "kind": t.kind, "start": t.start, "stop": t.stop, "deadline_s": max(0.0, t.deadline_s - now_s)}
            for t in self.open.values()
            if t.id in self.unaccepted
        ]
        return wire.encode("submit", mid, {"rows": list(self.rows), "tasks": tasks}, self.specs)


class Unfinished:
    """Submissions in order, indexed by task. No clock, no sockets."""

    def __init__(self) -> None:
        self._submissions: list[Submission] = []
        self._where: dict[str, Submission] = {}

    def add(self, submission: Submission) -> None:
        self._submissions.append(submission)
        self._where.update(dict.fromkeys(submission.open, submission))

    def ids(self) -> list[str]:
        """Return the ids of tasks without an outcome."""
        return list(self._where)

    def due(self, now_s: float) -> Iterator[Submission]:
        """Yield the submissions to send now, among the first MAX_IN_FLIGHT unaccepted ones."""
        in_flight = 0
        for submission in self._submissions:
            if not submission.unaccepted:
                continue
            if now_s >= submission.retry_at_s:
                yield submission
            in_flight += 1
            if in_flight >= MAX_IN_FLIGHT:
                return

    def accepted(self, ids: Iterable[str]) -> None:
        """Record that the broker has accepted these tasks."""
        for task_id in ids:
            if task_id in self._where:
                self._where[task_id].unaccepted.discard(task_id)

    def full(self, task_id: str, now_s: float) -> None:
        """Resend this task after FULL_RETRY_S because the broker is full."""
        if task_id in self._where:
            self._where[task_id].retry_at_s = now_s + FULL_S

    def forgotten(self) -> None:
        """Mark all submissions as unaccepted, to be resent immediately to a new broker."""
        for submission in self._submissions:
            submission.unaccepted = set(submission.open)
            submission.retry_at_s = float("-inf")

    def drop(self, task_id: str) -> bool:
        """Remove a task. Returns False if it is unknown, e.g. for a duplicate outcome."""
        submission = self._where.pop(task_id, None)
        if submission is None:
            return False
        del submission.open[task_id]
        submission.unaccepted.discard(task_id)
        if not submission.open:
            self._submissions.remove(submission)
        return True
