"""Data that the broker reports to its owner: status snapshots and finished tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.transport.tasks import Completion
from wfm_ds.transport.wire import Buffer, TensorSpec


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """A snapshot of the broker's state."""

    kinds: Mapping[str, tuple[int, int]]  # kind -> (number of waiting tasks, number of leased tasks)
    workers: Mapping[str, float | None]  # id -> seconds since its last progress; None: idle
    clients: Mapping[str, float]  # name -> seconds since its last message
    counts: Mapping[str, int]  # ledger counters: submitted, done, quarantined, requeued, duplicate, ...
    rejected: int  # number of dropped messages
    held_bytes: int  # tensor bytes of waiting and leased tasks


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task that is done or quarantined.

    `frames` are the received tensor buffers. They are valid only while the observer runs.
    """

    kind: str
    rows: Sequence[Mapping[str, Any]]
    specs: Sequence[TensorSpec]
    frames: Sequence[Any]
    completion: Completion
    waited_s: float  # approximate time from submission to the start of the last attempt

    def first_bytes(self, count: int) -> bytes:
        """Return up to `count` leading bytes of the first tensor."""
        content = bytearray()
        for frame in self.frames[: self.specs[0].num_frames if self.specs else 0]:
            buffer: Buffer = frame.buffer
            content += buffer[: count - len(content)]
            if len(content) >= count:
                break
        return bytes(content)


def ignore_task(ended: FinishedTask) -> None:
    """Do nothing. Used as the default observer."""
