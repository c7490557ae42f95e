"""Records of the ledger: tasks, leases, workers and submitters. Plain data, modified only by ledger.py."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from wfm_ds.transport.tasks import Completion, Task, TaskState


@dataclass(slots=True)
class TaskEntry:
    """A task from its submission until its completion is released."""

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
        """Return whether the task is unfinished."""
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
    """A worker with its leases."""

    kinds: frozenset[str]
    credit: int
    leases: dict[str, Lease] = field(default_factory=dict)

    def can_take(self, rows: int, *, exclusive: bool) -> bool:
        """Return whether the worker can hold another task with this number of rows.

        exclusive: True for a task that may have killed a worker. A worker runs it alone, so that no other task is lost
        if it does so again.
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
