"""Data that a hub holds for others to read: tensors of results until they are released, and announced files.

Pure bookkeeping around buffers and paths; the hub's thread alone uses it. Frames stay as they were received.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.pipes import wire
from wfm_ds.pipes.wire import FRAME_BYTES, Buffer, TensorSpec


class NotHeld(LookupError):
    """Raised when nothing is held under that name; the message says why."""


def run_of(owner: str) -> str:
    """RUN of an owner RUN/CLIENT."""
    return owner.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class _Result:
    owner: str
    specs: tuple[TensorSpec, ...]
    frames: tuple[Any, ...]  # zmq.Frame

    @property
    def run(self) -> str:
        return run_of(self.owner)


class Spool:
    """Results by task id. `held_bytes` is bounded by what their submitter admits: it releases what it has used."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._results: dict[str, _Result] = {}
        self._ids_of: dict[str, set[str]] = {}  # by owner: what is held for it
        self._files: dict[str, Path] = {}

    def put(self, task_id: str, owner: str, specs: tuple[TensorSpec, ...], frames: Iterable[Any]) -> None:
        self._drop(task_id)
        self._results[task_id] = _Result(owner, specs, tuple(frames))
        self._ids_of.setdefault(owner, set()).add(task_id)
        self.held_bytes += sum(spec.nbytes for spec in specs)

    def result(self, task_id: str, run: str) -> tuple[tuple[TensorSpec, ...], tuple[Any, ...]]:
        """The tensors of a result, for a client of that run. Raises NotHeld."""
        found = self._results.get(task_id)
        if found is None or found.run != run:
            raise NotHeld(f"the hub does not have the result {task_id}")
        return found.specs, found.frames

    def drop(self, ids: Iterable[str], run: str) -> None:
        """Forget results for a client of that run. Ids that are not held or belong to another run are ignored."""
        for task_id in ids:
            found = self._results.get(task_id)
            if found is not None and found.run == run:
                self._drop(task_id)

    def drop_of(self, owner: str) -> None:
        for task_id in list(self._ids_of.get(owner, ())):
            self._drop(task_id)

    def announce(self, files: Mapping[str, Path]) -> None:
        """Offer these files, and no others, under these names."""
        self._files = dict(files)

    def piece(self, name: str, offset: int) -> tuple[list[TensorSpec], list[Buffer]]:
        """One frame of a file from `offset` on, or less at its end, as a uint8 tensor. Raises NotHeld."""
        path = self._files.get(name)
        if path is None:
            raise NotHeld(f"the hub offers no file {name}")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                piece = np.frombuffer(file.read(FRAME_BYTES), dtype=np.uint8)
        except OSError as error:
            raise NotHeld(f"{name} cannot be read: {error.strerror}") from error
        specs, frames = wire.pack_tensors([("bytes", piece)])
        return specs, frames[0]

    def _drop(self, task_id: str) -> None:
        found = self._results.pop(task_id, None)
        if found is not None:
            self.held_bytes -= sum(spec.nbytes for spec in found.specs)
            ids = self._ids_of[found.owner]
            ids.remove(task_id)
            if not ids:
                del self._ids_of[found.owner]
