"""Submit rows to several kinds of workers, split into messages and tasks within the limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.pipes.client import PipeClient
from wfm_ds.pipes.messages import MAX_ROWS
from wfm_ds.pipes.pending_submissions import TaskRequest
from wfm_ds.pipes.wire import Array, WireError

MAX_SUBMISSION_BYTES = 64 * 2**20  # tensor bytes per message; a larger row gets its own message


@dataclass(frozen=True, slots=True)
class SubmittedTask:
    """One task: submitted rows [start, stop) for a worker of `kind`."""

    id: str
    kind: str
    start: int
    stop: int
    failure: str | None = None
    """Reason why it could not be sent. It then gets no outcome."""


def submit_rows(
    pipe: PipeClient,
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[Array],
    max_rows: Mapping[str, int],
    new_id: Callable[[str], str],
    deadline_s: float,
) -> list[SubmittedTask]:
    """Submit the rows, one tensor each, to every kind in `max_rows`, in tasks of at most `max_rows[kind]` rows.

    Each tensor is sent once for all kinds. `new_id(kind)` returns a new task id. Do not modify the tensors until the
    tasks have ended. Only rows that exceed the message limits by themselves fail.
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
    """Submit one message, or two halves if the header is too large."""
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
