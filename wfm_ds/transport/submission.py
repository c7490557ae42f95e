"""Submit rows to workers of several kinds, split into messages and tasks that respect the size limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.messages import MAX_ROWS
from wfm_ds.transport.pending_submissions import TaskRequest
from wfm_ds.transport.wire import Array, WireError

MAX_SUBMISSION_BYTES = 64 * 2**20  # tensor bytes per message; a larger row gets its own message


@dataclass(frozen=True, slots=True)
class SubmittedTask:
    """A task: rows [start, stop) of the submitted rows, for one worker of `kind`."""

    id: str
    kind: str
    start: int
    stop: int
    failure: str | None = None
    """Reason why the task could not be sent, or None if it was sent. A task that was not sent has no outcome."""


def submit_rows(
    pipe: PipeClient,
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[Array],
    max_rows: Mapping[str, int],
    new_id: Callable[[str], str],
    deadline_s: float,
) -> list[SubmittedTask]:
    """Submit all rows to each kind of worker in `max_rows`, in tasks of at most `max_rows[kind]` rows.

    tensors: one per row. Each is sent only once for all kinds. Do not modify them until the tasks have ended.
    new_id: function that returns a new task id for a kind. If a row exceeds the size limits of a message, only the
    tasks with this row fail.
    """
    tasks: list[SubmittedTask] = []
    for start, stop in _split_into_messages([tensor.nbytes for tensor in tensors]):
        tasks += _submit_message(pipe, rows, tensors, max_rows, new_id, deadline_s, start, stop)
    return tasks


def _split_into_messages(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= MAX_ROWS or total + size > MAX_SUBMISSION_BYTES):
            yield start, at
            start, total = at, 0
        total += size
    if sizes:
        yield start, len(sizes)


def _submit_message(
    pipe: PipeClient,
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[Array],
    max_rows: Mapping[str, int],
    new_id: Callable[[str], str],
    deadline_s: float,
    start: int,
    stop: int,
) -> list[SubmittedTask]:
    """Submit rows [start, stop) in one message, or in two halves if the header is too large."""
    tasks = [
        SubmittedTask(new_id(kind), kind, at, min(at + limit, stop))
        for kind, limit in max_rows.items()
        for at in range(start, stop, limit)
    ]
    requests = [TaskRequest(t.id, t.kind, t.start - start, t.stop - start, deadline_s) for t in tasks]
    try:
        pipe.submit(rows[start:stop], [("media", tensor) for tensor in tensors[start:stop]], requests)
    except WireError as error:
        if stop - start > 1:
            half = (start + stop) // 2
            halves = itertools.pairwise((start, half, stop))
            return [
                t for a, b in halves for t in _submit_message(pipe, rows, tensors, max_rows, new_id, deadline_s, a, b)
            ]
        return [SubmittedTask(t.id, t.kind, t.start, t.stop, f"cannot be sent: {error}") for t in tasks]
    return tasks
