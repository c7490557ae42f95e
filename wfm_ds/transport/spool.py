"""Data that the broker serves to clients: the tensors of results until clients release them, and announced files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.transport import wire
from wfm_ds.transport.wire import MAX_FRAME_BYTES, Buffer, TensorSpec


class NotInSpool(LookupError):
    """Raised if the spool does not have the requested data. The message gives the reason."""


def owner_run(owner: str) -> str:
    return owner.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class _SpooledResult:
    owner: str
    specs: tuple[TensorSpec, ...]
    frames: tuple[Any, ...]  # zmq.Frame

    @property
    def run(self) -> str:
        return owner_run(self.owner)


class Spool:
    """Stores the results of tasks by task id, and the paths of files that clients may request by name.

    `held_bytes` is the total size of the unreleased results. Only the broker's thread uses the spool.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._results: dict[str, _SpooledResult] = {}
        self._ids_by_owner: dict[str, set[str]] = {}  # owner -> task ids
        self._files: dict[str, Path] = {}

    def put(self, task_id: str, owner: str, specs: tuple[TensorSpec, ...], frames: Iterable[Any]) -> None:
        self._drop_result(task_id)
        self._results[task_id] = _SpooledResult(owner, specs, tuple(frames))
        self._ids_by_owner.setdefault(owner, set()).add(task_id)
        self.held_bytes += sum(spec.nbytes for spec in specs)

    def read_result(self, task_id: str, run: str) -> tuple[tuple[TensorSpec, ...], tuple[Any, ...]]:
        """Return (specs, frames) of a result. Raises NotInSpool if it is missing or belongs to another run."""
        result = self._results.get(task_id)
        if result is None or result.run != run:
            raise NotInSpool(f"the broker does not have result {task_id}")
        return result.specs, result.frames

    def drop_results(self, ids: Iterable[str], run: str) -> None:
        """Drop results of the run `run`. Unknown ids and results of other runs are ignored."""
        for task_id in ids:
            result = self._results.get(task_id)
            if result is not None and result.run == run:
                self._drop_result(task_id)

    def drop_owner(self, owner: str) -> None:
        for task_id in list(self._ids_by_owner.get(owner, ())):
            self._drop_result(task_id)

    def announce_files(self, files: Mapping[str, Path]) -> None:
        """Replace the announced files. files: {name: path}."""
        self._files = dict(files)

    def read_piece(self, name: str, offset: int) -> tuple[list[TensorSpec], list[Buffer]]:
        """Read a part of an announced file, starting at byte `offset`, as a uint8 tensor of at most one message frame.

        Raises NotInSpool if the file is not announced or cannot be read.
        """
        path = self._files.get(name)
        if path is None:
            raise NotInSpool(f"the broker has no file {name}")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                piece = np.frombuffer(file.read(MAX_FRAME_BYTES), dtype=np.uint8)
        except OSError as error:
            raise NotInSpool(f"{name} cannot be read: {error.strerror}") from error
        return wire.pack_tensors([("bytes", piece)])

    def _drop_result(self, task_id: str) -> None:
        result = self._results.pop(task_id, None)
        if result is not None:
            self.held_bytes -= sum(spec.nbytes for spec in result.specs)
            ids = self._ids_by_owner[result.owner]
            ids.remove(task_id)
            if not ids:
                del self._ids_by_owner[result.owner]
