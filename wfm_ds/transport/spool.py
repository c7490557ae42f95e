"""Data that the broker serves to clients: the tensors of results until clients release them, and announced files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.transport import wire
from wfm_ds.transport.wire import MAX_FRAME_BYTES, Buffer, TensorSpec


class NotInSpool(LookupError):
    """Raised if the spool does not have the requested data. The message gives the reason."""


def owner_run(owner: str) -> str:
    return owner.split("/", 1)[0]


class Spool:
    """Results of tasks by task id, and files that clients may request by name. Only for the broker's thread."""

    def __init__(self) -> None:
        # {task id: (owner, specs, frames)}; a frame is a zmq.Frame
        self._results: dict[str, tuple[str, tuple[TensorSpec, ...], tuple[Any, ...]]] = {}
        self._files: dict[str, Path] = {}

    def put(self, task_id: str, owner: str, specs: tuple[TensorSpec, ...], frames: Iterable[Any]) -> None:
        self._results[task_id] = owner, specs, tuple(frames)

    def read_result(self, task_id: str, run: str) -> tuple[tuple[TensorSpec, ...], tuple[Any, ...]]:
        """Return (specs, frames) of a result. Raises NotInSpool if it is missing or belongs to another run."""
        if not self._has_result(task_id, run):
            raise NotInSpool(f"the broker does not have result {task_id}")
        return self._results[task_id][1:]

    def drop_results(self, ids: Iterable[str], run: str) -> None:
        """Drop results of the run `run`. Unknown ids and results of other runs are ignored."""
        for task_id in ids:
            if self._has_result(task_id, run):
                del self._results[task_id]

    def drop_owner(self, owner: str) -> None:
        self._results = {task_id: result for task_id, result in self._results.items() if result[0] != owner}

    def announce_files(self, files: Mapping[str, Path]) -> None:
        """Replace the announced files. files: {name: path}."""
        self._files = dict(files)

    def read_piece(self, name: str, offset: int) -> tuple[list[TensorSpec], list[Buffer]]:
        """Read a frame of an announced file, from byte `offset`, as a uint8 tensor. Raises NotInSpool if it fails."""
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

    def _has_result(self, task_id: str, run: str) -> bool:
        return task_id in self._results and owner_run(self._results[task_id][0]) == run
