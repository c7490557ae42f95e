"""Rows for several kinds of workers, cut into messages and tasks that fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.pipes.client import PipeClient
from wfm_ds.pipes.messages import MAX_ROWS
from wfm_ds.pipes.unfinished import TaskRequest
from wfm_ds.pipes.wire import Array, WireError

SUBMISSION_BYTES = 64 * 2**20  # of tensors in one message; one larger row travels alone


@dataclass(frozen=True, slots=True)
class Piece:
    """One task: rows [start, stop) of what was submitted, for a worker of `kind`."""

    id: str
    kind: str
    start: int
    stop: int
    failure: str | None = None
    """Why it could not be sent: then it will have no outcome."""


def submit_in_pieces(
    pipe: PipeClient,
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[Array],
    max_rows: Mapping[str, int],
    new_id: Callable[[str], str],
    deadline_s: float,
) -> list[Piece]:
    """Submit the rows, one tensor each, to every kind in `max_rows`, in tasks of at most this many rows.

    A tensor travels once for all kinds. `new_id` makes a task's id of its kind. The tensors must not change until the
    tasks have ended. Only a row that is too large by itself cannot be sent.
    """
    pieces: list[Piece] = []
    for start, stop in _messages([tensor.nbytes for tensor in tensors]):
        pieces += _submit(pipe, rows, tensors, max_rows, new_id, deadline_s, start, stop)
    return pieces


def _messages(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= MAX_ROWS or total + size > SUBMISSION_BYTES):
            yield start, at
            start, total = at, 0
        total += size
    if sizes:
        yield start, len(sizes)


def _submit(
    pipe: PipeClient,
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[Array],
    max_rows: Mapping[str, int],
    new_id: Callable[[str], str],
    deadline_s: float,
    start: int,
    stop: int,
) -> list[Piece]:
    """One message, or two halves if its header is too large for one."""
    pieces = [
        Piece(new_id(kind), kind, at, min(at + most, stop))
        for kind, most in max_rows.items()
        for at in range(start, stop, most)
    ]
    requests = [TaskRequest(p.id, p.kind, p.start - start, p.stop - start, deadline_s) for p in pieces]
    try:
        pipe.submit(rows[start:stop], [("media", tensor) for tensor in tensors[start:stop]], requests)
    except WireError as error:
        if stop - start > 1:
            half = (start + stop) // 2
            cuts = itertools.pairwise((start, half, stop))
            return [p for a, b in cuts for p in _submit(pipe, rows, tensors, max_rows, new_id, deadline_s, a, b)]
        return [Piece(p.id, p.kind, p.start, p.stop, f"cannot be sent: {error}") for p in pieces]
    return pieces
