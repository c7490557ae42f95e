"""The ledger's vocabulary: tasks, grants to workers, and completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from wfm_ds.pipes.wire import TensorSpec


class State(Enum):
    WAITING = auto()
    LEASED = auto()
    DONE = auto()
    QUARANTINED = auto()


class Admission(Enum):
    NEW = auto()
    KNOWN = auto()


class ReportStatus(Enum):
    """The fate of a worker's report."""

    ACCEPTED = auto()
    LATE = auto()  # accepted from a lease that had expired
    DUPLICATE = auto()  # the task is finished, or gone
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    owner: str  # who submitted it; completions and their numbers belong to the owner
    kind: str
    num_bytes: int  # of its payload, for the limit on what is held
    deadline_s: float  # on the ledger's clock
    payload: Any = None  # opaque; dropped when the task is finished
    rows: int = 1  # its size in a worker's credit


@dataclass(frozen=True, slots=True)
class TaskPayload:
    """A task's payload in a hub: its rows and their tensors, as they were received."""

    rows: list[dict[str, Any]]
    specs: tuple[TensorSpec, ...]
    frames: tuple[Any, ...]  # zmq.Frame
    submitted_at_s: float  # on the hub's clock


@dataclass(frozen=True, slots=True)
class Grant:
    worker: str
    task: Task
    attempt: int


@dataclass(frozen=True, slots=True)
class Completion:
    seq: int
    id: str
    ok: bool
    worker: str
    attempt: int
    seconds: float
    meta: Mapping[str, Any]
    reason: str


class Refused(ValueError):
    """A task cannot be taken; the message says why. One that begins with "full" may be offered again."""
