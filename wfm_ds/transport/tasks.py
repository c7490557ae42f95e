"""Data types of the broker and its ledger: tasks, leases, completions, status."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from wfm_ds.transport.wire import Buffer, TensorSpec


class TaskState(Enum):
    WAITING = auto()
    LEASED = auto()
    DONE = auto()
    QUARANTINED = auto()


class ReportStatus(Enum):
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
    """Rows of a task and their tensor frames, as received by the broker."""

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
    """Raised if the ledger rejects a task. If the reason is "full", the task may be submitted again later."""


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    kinds: Mapping[str, tuple[int, int]]  # kind -> (number of waiting tasks, number of leased tasks)
    workers: Mapping[str, float | None]  # id -> seconds since its last progress; None: idle
    clients: Mapping[str, float]  # name -> seconds since its last message
    counts: Mapping[str, int]  # ledger counters: submitted, done, quarantined, requeued, duplicate, ...
    rejected: int  # number of dropped messages
    held_bytes: int  # tensor bytes of waiting and leased tasks


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A task that is done or quarantined. The received tensors in `frames` are valid only while the observer runs."""

    kind: str
    rows: Sequence[Mapping[str, Any]]
    specs: Sequence[TensorSpec]
    frames: Sequence[Any]
    completion: Completion
    waited_s: float  # approximate time from submission to the start of the last attempt

    def first_bytes(self, count: int) -> bytes:
        content = bytearray()
        for frame in self.frames[: self.specs[0].num_frames if self.specs else 0]:
            buffer: Buffer = frame.buffer
            content += buffer[: count - len(content)]
            if len(content) >= count:
                break
        return bytes(content)


@dataclass(slots=True)
class TaskEntry:
    """State of a task. Only ledger.py changes it."""

    task: Task
    order: int  # submission order; a requeued task keeps it and is leased before newer ones
    state: TaskState = TaskState.WAITING
    attempt: int = 0  # number of leases; identifies the lease in a worker's report
    failures: int = 0
    worker: str | None = None
    tried_workers: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)  # reasons of failed attempts
    is_suspect: bool = False  # it failed, or its worker died or hung

    @property
    def is_open(self) -> bool:
        return self.state in (TaskState.WAITING, TaskState.LEASED)


@dataclass(slots=True)
class Lease:
    attempt: int
    rows: int
    is_exclusive: bool
    stall_s: float
    progress_at_s: float
    done: int = 0
    is_void: bool = False


@dataclass(slots=True)
class LeaseHolder:
    kinds: frozenset[str]
    credit: int
    leases: dict[str, Lease] = field(default_factory=dict)

    def can_take(self, rows: int, *, exclusive: bool) -> bool:
        """Return whether the worker can take these rows too.

        exclusive: whether they must run alone, because they may kill the worker.
        """
        if not self.leases:
            return True
        exclusive = exclusive or any(lease.is_exclusive for lease in self.leases.values())
        return not exclusive and sum(lease.rows for lease in self.leases.values()) + rows <= self.credit


@dataclass(slots=True)
class Submitter:
    last_seq: int = 0
    task_ids: dict[str, None] = field(default_factory=dict)  # ids of its TaskEntry records
    # OrderedDict: removing from the front of a dict leaves gaps that iteration must skip.
    completions: OrderedDict[str, Completion] = field(default_factory=OrderedDict)  # by task id, in order of seq
    removed_ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
