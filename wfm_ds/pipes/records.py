"""The records of a ledger: tasks in hand, leases, workers and submitters. Plain data; ledger.py changes it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from wfm_ds.pipes.tasks import Completion, State, Task


@dataclass(slots=True)
class Entry:
    """A task from its submission until its completion is released."""

    task: Task
    order: int  # kept for life: a requeued task is leased before younger ones
    state: State = State.WAITING
    attempt: int = 0  # how often it was leased: which lease a worker speaks of
    failures: int = 0
    worker: str | None = None
    tried: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)  # of the failures
    suspect: bool = False  # it failed, or its worker died or hung

    @property
    def open(self) -> bool:
        """True until the task is finished."""
        return self.state in (State.WAITING, State.LEASED)


@dataclass(slots=True)
class Lease:
    attempt: int
    rows: int
    alone: bool
    stall_s: float
    progress_at_s: float
    done: int = 0
    void: bool = False


@dataclass(slots=True)
class LeaseHolder:
    """A worker, as the ledger knows it."""

    kinds: frozenset[str]
    credit: int
    leases: dict[str, Lease] = field(default_factory=dict)

    def takes(self, rows: int, *, alone: bool) -> bool:
        """Return whether a task fits beside what the worker holds. A task that may have killed a worker is held alone:
        if it kills again, no other task is lost with it."""
        if not self.leases:
            return True
        alone = alone or any(lease.alone for lease in self.leases.values())
        return not alone and sum(lease.rows for lease in self.leases.values()) + rows <= self.credit


@dataclass(slots=True)
class Submitter:
    last_seq: int = 0
    tasks: dict[str, None] = field(default_factory=dict)  # ids of its entries
    # Ordered, and cheap at both ends: a dict looks again at all that was removed from its front.
    completions: OrderedDict[str, Completion] = field(default_factory=OrderedDict)  # by task id, in order of seq
    gone: OrderedDict[str, None] = field(default_factory=OrderedDict)
