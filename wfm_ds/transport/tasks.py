"""Data types of the ledger: tasks, leases granted to workers, and completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from wfm_ds.transport.wire import TensorSpec


class TaskState(Enum):
    WAITING = auto()
    LEASED = auto()
    DONE = auto()
    QUARANTINED = auto()


class Admission(Enum):
    NEW = auto()
    KNOWN = auto()


class ReportStatus(Enum):
    """Outcome of a worker's report in the ledger."""

    ACCEPTED = auto()
    LATE = auto()  # accepted although the lease had expired
    DUPLICATE = auto()  # the task is already finished or removed
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    owner: str  # RUN/CLIENT of the submitter; completions are numbered per owner
    kind: str
    num_bytes: int  # payload size, for the memory limit
    deadline_s: float  # on the ledger's clock
    payload: Any = None  # opaque; dropped when the task finishes
    rows: int = 1  # number of rows, counted against the worker's credit


@dataclass(frozen=True, slots=True)
class TaskPayload:
    """Payload of a task: its rows and their tensor frames, as received by the broker."""

    rows: list[dict[str, Any]]
    specs: tuple[TensorSpec, ...]
    frames: tuple[Any, ...]  # zmq.Frame
    submitted_at_s: float  # on the broker's clock


@dataclass(frozen=True, slots=True)
class LeaseGrant:
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


class TaskRejected(ValueError):
    """The ledger rejected a task.

    The message gives the reason. If the reason is "full", the task may be submitted again later.
    """
