"""A hub's reports to its owner: its state, and every task that ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.pipes.tasks import Completion
from wfm_ds.pipes.wire import Buffer, TensorSpec


@dataclass(frozen=True, slots=True)
class HubStatus:
    """The state of a hub at one moment."""

    kinds: Mapping[str, tuple[int, int]]  # tasks that wait and that are leased, by kind
    workers: Mapping[str, float | None]  # by id: seconds since its work was last seen to advance; None: it has none
    clients: Mapping[str, float]  # by name: seconds since it was heard of
    counts: Mapping[str, int]  # of the ledger: submitted, done, quarantined, requeued, duplicate, ...
    rejected: int  # messages that were dropped
    held_bytes: int  # of media, for tasks that wait or are worked on


@dataclass(frozen=True, slots=True)
class Ended:
    """A task that is done or quarantined. `frames` are the received buffers of its tensors, valid during the call."""

    kind: str
    rows: Sequence[Mapping[str, Any]]
    specs: Sequence[TensorSpec]
    frames: Sequence[Any]
    completion: Completion
    waited_s: float  # from its submission to the beginning of the attempt that ended it, about

    def first_bytes(self, count: int) -> bytes:
        """The first bytes of the first tensor; fewer if it is smaller."""
        taken = bytearray()
        for frame in self.frames[: self.specs[0].num_frames if self.specs else 0]:
            buffer: Buffer = frame.buffer
            taken += buffer[: count - len(taken)]
            if len(taken) >= count:
                break
        return bytes(taken)


def ignore(ended: Ended) -> None:
    """The observer of a hub without one."""
