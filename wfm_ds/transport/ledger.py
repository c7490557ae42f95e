"""Tasks and their leases to workers: a state machine without I/O and without a clock.

    WAITING --lease--> LEASED --result--> DONE --release--> removed (its id is remembered)
       ^                 |  `--fatal failure, or no attempts left--> QUARANTINED --release--> removed
       `----requeue------'      cancel: removed from any state; disabled kind, deadline: QUARANTINED

A lease becomes *void* when its task is finished by another worker, cancelled or requeued. A void lease still uses the
worker's credit (the rows that it can hold) until the worker reports or is lost, so a hanging worker gets no more tasks.
The first result of a task counts; later results are ignored.

An *attempt* is a lease that ended in a failure, a stall or the death of its worker. After MAX_ATTEMPTS attempts a task
is quarantined.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from wfm_ds.transport.priority_queue import PriorityQueue
from wfm_ds.transport.tasks import (
    Completion,
    Lease,
    LeaseGrant,
    LeaseHolder,
    ReportStatus,
    Submitter,
    Task,
    TaskEntry,
    TaskRejected,
    TaskState,
)

MAX_ATTEMPTS = 3
MAX_REMEMBERED_IDS = 65536  # ids of removed tasks, per owner


class Ledger:
    """States of tasks and leases. All times are in seconds, on a monotonic clock that the caller reads."""

    def __init__(
        self,
        stall_s: Mapping[str, float],
        *,
        max_waiting: int,
        max_bytes: int,
        max_waiting_by_kind: Mapping[str, int] | None = None,
        on_end: Callable[[Task, Completion], None] = lambda task, completion: None,
    ) -> None:
        """stall_s: {kind of task: maximum seconds without progress}. Only these kinds can be submitted.

        max_waiting: maximum number of waiting tasks. max_bytes: maximum payload bytes of waiting and leased tasks.
        max_waiting_by_kind: {kind of task: maximum number of waiting tasks of this kind}.
        on_end: function called as on_end(task, completion) for every task that is done or quarantined.
        """
        self.stall_s = dict(stall_s)
        self.max_waiting_by_kind = dict(max_waiting_by_kind or {})
        self.max_waiting = max_waiting
        self.max_bytes = max_bytes
        self.is_leasing = True  # False while the broker drains
        self.counts: Counter[str] = Counter()
        self.held_bytes = 0
        self._entries: dict[str, TaskEntry] = {}
        self._waiting: dict[str, PriorityQueue[str]] = {kind: PriorityQueue() for kind in stall_s}  # oldest first
        self._deadlines: PriorityQueue[str] = PriorityQueue()  # deadlines of waiting tasks
        # (worker, task id) by the time at which the lease stalls, including void leases
        self._stalls: PriorityQueue[tuple[str, str]] = PriorityQueue()
        self._on_end = on_end
        self._workers: dict[str, LeaseHolder] = {}
        self._owners: dict[str, Submitter] = {}
        self._disabled_kinds: dict[str, str] = {}
        self._orders = itertools.count(1)

    # Submitters

    def submit(self, task: Task) -> bool:
        """Add a task. Returns False if the same task was already added.

        Raises TaskRejected for an unknown kind, an id that another owner uses, or a full queue.
        """
        entry, owner = self._entries.get(task.id), self._owners.setdefault(task.owner, Submitter())
        if entry is not None and entry.task.owner != task.owner:
            raise TaskRejected("this id belongs to another client")
        if entry is not None or task.id in owner.removed_ids:
            return False
        if task.kind not in self.stall_s:
            raise TaskRejected(f"unknown task kind {task.kind}; available: {', '.join(sorted(self.stall_s))}"[:300])
        if task.num_bytes > self.max_bytes:
            raise TaskRejected(f"task too large: {task.num_bytes} bytes, limit {self.max_bytes}")
        limit = self.max_waiting_by_kind.get(task.kind, self.max_waiting)
        is_full = len(self._waiting[task.kind]) >= limit or len(self._deadlines) >= self.max_waiting
        if is_full or self.held_bytes + task.num_bytes > self.max_bytes:
            raise TaskRejected("full")
        entry = self._entries[task.id] = TaskEntry(task, next(self._orders))
        owner.task_ids[task.id] = None
        self.held_bytes += task.num_bytes
        self.counts["submitted"] += 1
        self._enqueue_task(entry)
        return True

    def new_completions(self, owner: str, after_seq: int) -> list[Completion]:
        """Return the unreleased completions with a sequence number above `after_seq`, oldest first."""
        submitter = self._owners.get(owner)
        newest_first = reversed(submitter.completions.values()) if submitter else ()
        return list(itertools.takewhile(lambda c: c.seq > after_seq, newest_first))[::-1]

    def release_completions(self, owner: str, up_to_seq: int) -> None:
        completions = self._owners[owner].completions if owner in self._owners else {}
        while completions and (oldest := next(iter(completions.values()))).seq <= up_to_seq:
            self._remove_task(self._entries[oldest.id], "released")

    def cancel_tasks(self, owner: str, ids: Iterable[str]) -> list[tuple[str, str]]:
        """Drop tasks. Unknown ids are ignored. Returns (worker, task id) of the dropped tasks that are running."""
        running = []
        for task_id in ids:
            entry = self._entries.get(task_id)
            if entry is not None and entry.task.owner == owner:
                if entry.worker is not None:
                    running.append((entry.worker, task_id))
                self._remove_task(entry, "cancelled" if entry.is_open else "released")
        return running

    def forget_owner(self, owner: str) -> list[tuple[str, str]]:
        """Drop all data of a submitter. Returns (worker, task id) of its running tasks."""
        submitter = self._owners.get(owner)
        running = self.cancel_tasks(owner, list(submitter.task_ids)) if submitter else []
        self._owners.pop(owner, None)
        return running

    def disable_kind(self, kind: str, why: str) -> None:
        """Fail all waiting and future tasks of this kind with the reason `why`."""
        self._disabled_kinds[kind] = why
        while entry := self._oldest_waiting_task(kind):
            self._finish_task(entry, TaskState.QUARANTINED, reason=why)

    # Workers

    def register_worker(self, worker: str, kinds: frozenset[str], credit: int, held: Iterable[str]) -> None:
        """Add or update a worker.

        kinds: kinds of tasks that it accepts. credit: number of rows that it can hold. held: ids of the tasks that it
        already has. Tasks that are leased to it but not in `held` are requeued.
        """
        holder = self._workers.setdefault(worker, LeaseHolder(kinds, credit))
        holder.kinds, holder.credit = kinds, credit
        for task_id in holder.leases.keys() - set(held):
            self._return_lease(worker, task_id)

    def lease_tasks(self, now_s: float) -> list[LeaseGrant]:
        """Lease the oldest tasks of each kind to workers with free credit."""
        grants = []
        for kind in self._waiting if self.is_leasing else ():
            while (entry := self._oldest_waiting_task(kind)) and (worker := self._find_free_worker(entry)):
                self._dequeue_task(entry)
                entry.state, entry.worker = TaskState.LEASED, worker
                entry.attempt += 1
                entry.tried_workers.add(worker)
                lease = Lease(entry.attempt, entry.task.rows, entry.is_suspect, self.stall_s[kind], now_s)
                self._workers[worker].leases[entry.task.id] = lease
                self._stalls.put((worker, entry.task.id), now_s + lease.stall_s)
                grants.append(LeaseGrant(worker, entry.task, entry.attempt))
        return grants

    def record_progress(self, worker: str, task_id: str, attempt: int, done: int, now_s: float) -> None:
        """Renew the lease if the task's progress count `done` has increased since the last report."""
        lease = self._worker_leases(worker).get(task_id)
        if lease is not None and lease.attempt == attempt and done > lease.done:
            lease.done, lease.progress_at_s = done, now_s
            self._stalls.put((worker, task_id), now_s + lease.stall_s)

    def record_result(
        self, worker: str, task_id: str, attempt: int, seconds: float, meta: Mapping[str, Any]
    ) -> ReportStatus:
        """Record the result of a task. The worker may then drop its copy, regardless of the returned status."""
        is_current = self._end_lease(worker, task_id)
        entry = self._entries.get(task_id)
        if entry is None:
            was_removed = any(task_id in owner.removed_ids for owner in self._owners.values())
            return self._count_report(ReportStatus.DUPLICATE if was_removed else ReportStatus.UNKNOWN)
        if entry.state in (TaskState.DONE, TaskState.QUARANTINED):
            return self._count_report(ReportStatus.DUPLICATE)
        self._finish_task(entry, TaskState.DONE, worker=worker, seconds=seconds, meta=meta, attempt=attempt)
        return self._count_report(ReportStatus.ACCEPTED if is_current else ReportStatus.LATE)

    def record_failure(self, worker: str, task_id: str, attempt: int, reason: str, fatal: bool) -> ReportStatus:
        """Record a failed attempt. Requeues the task, or quarantines it if this is fatal or no attempts are left."""
        lease = self._worker_leases(worker).get(task_id)
        if lease is not None and lease.attempt != attempt:
            return self._count_report(ReportStatus.DUPLICATE)  # reports an earlier lease of the same worker
        is_current = self._end_lease(worker, task_id)
        entry = self._entries.get(task_id)
        if entry is None or not is_current:
            return self._count_report(ReportStatus.DUPLICATE if entry else ReportStatus.UNKNOWN)
        self._end_attempt(entry, reason, fatal)
        return self._count_report(ReportStatus.ACCEPTED)

    def remove_lost_worker(self, worker: str, why: str) -> list[str]:
        """Requeue the tasks of a lost worker and return their ids. Each lease counts as an attempt."""
        lost = list(self._worker_leases(worker))
        for task_id in lost:
            if self._end_lease(worker, task_id):
                self._end_attempt(self._entries[task_id], why, fatal=False)
        self._workers.pop(worker, None)
        return lost

    def remove_departed_worker(self, worker: str) -> list[str]:
        """Requeue the tasks of a worker that left, without counting an attempt. Returns their ids."""
        task_ids = list(self._worker_leases(worker))
        self.requeue_unsent(worker, task_ids)
        self._workers.pop(worker, None)
        return task_ids

    def requeue_unsent(self, worker: str, task_ids: Iterable[str]) -> None:
        """Requeue tasks that were leased but not sent to the worker, without counting an attempt."""
        for task_id in task_ids:
            self._return_lease(worker, task_id)

    def expire_leases(self, now_s: float) -> list[tuple[str, str, int]]:
        """Requeue tasks that made no progress for `stall_s` seconds. Quarantine waiting tasks past their deadline.

        Returns (worker, task id, attempt) of the stalled leases. Until the worker reports, a stalled lease is returned
        again every `stall_s` seconds, even if it is void.
        """
        stalled = []
        for worker, task_id in self._stalls.pop_due(now_s):
            lease = self._workers[worker].leases[task_id]
            stalled.append((worker, task_id, lease.attempt))
            self._stalls.put((worker, task_id), now_s + lease.stall_s)
            if not lease.is_void:
                lease.is_void = True
                self._end_attempt(self._entries[task_id], f"no progress for {lease.stall_s:g} s", fatal=False)
        for task_id in self._deadlines.pop_due(now_s):
            entry = self._entries[task_id]
            self._finish_task(entry, TaskState.QUARANTINED, reason="; ".join(["deadline", *entry.reasons]))
        return stalled

    # Queries

    def has_leases(self) -> bool:
        return any(not lease.is_void for worker in self._workers.values() for lease in worker.leases.values())

    def has_completions(self) -> bool:
        """Return whether there are unreleased completions."""
        return any(owner.completions for owner in self._owners.values())

    def find_owner(self, task_id: str) -> str | None:
        """Return the owner (RUN/CLIENT) of a task, or None if the task is unknown or removed."""
        entry = self._entries.get(task_id)
        return entry.task.owner if entry is not None else None

    def summarize_load(self, now_s: float) -> tuple[dict[str, tuple[int, int]], dict[str, float | None]]:
        """Return {kind: (num waiting, num leased)} and {worker: seconds since its last progress, or None if idle}."""
        leases = [(t, lease) for worker in self._workers.values() for t, lease in worker.leases.items()]
        leased = Counter(self._entries[task_id].task.kind for task_id, lease in leases if not lease.is_void)
        ages = {
            name: max((now_s - lease.progress_at_s for lease in worker.leases.values()), default=None)
            for name, worker in self._workers.items()
        }
        return {kind: (len(self._waiting[kind]), leased[kind]) for kind in self.stall_s}, ages

    # Transitions

    def _enqueue_task(self, entry: TaskEntry) -> None:
        entry.state, entry.worker = TaskState.WAITING, None
        self._waiting[entry.task.kind].put(entry.task.id, entry.order)
        self._deadlines.put(entry.task.id, entry.task.deadline_s)
        if entry.task.kind in self._disabled_kinds:
            self._finish_task(entry, TaskState.QUARANTINED, reason=self._disabled_kinds[entry.task.kind])

    def _end_attempt(self, entry: TaskEntry, reason: str, fatal: bool) -> None:
        entry.reasons.append(reason)
        entry.is_suspect = True
        entry.failures += 1
        if fatal or entry.failures >= MAX_ATTEMPTS:
            tries = f" ({entry.failures} attempts)" if entry.failures > 1 else ""
            self._finish_task(entry, TaskState.QUARANTINED, reason="; ".join(dict.fromkeys(entry.reasons)) + tries)
        else:
            self._requeue_task(entry)

    def _requeue_task(self, entry: TaskEntry) -> None:
        self.counts["requeued"] += 1
        self._enqueue_task(entry)

    def _finish_task(
        self,
        entry: TaskEntry,
        state: TaskState,
        *,
        worker: str = "",
        attempt: int | None = None,
        seconds: float = 0.0,
        meta: Mapping[str, Any] | None = None,
        reason: str = "",
    ) -> None:
        task = entry.task
        self._release_resources(entry)
        entry.state = state
        owner = self._owners[entry.task.owner]
        owner.last_seq += 1
        tried = entry.attempt if attempt is None else attempt
        ok = state is TaskState.DONE
        completion = Completion(owner.last_seq, task.id, ok, worker, tried, seconds, meta or {}, reason[:300])
        owner.completions[task.id] = completion
        self.counts["done" if ok else "quarantined"] += 1
        self._on_end(task, completion)

    def _remove_task(self, entry: TaskEntry, count_name: str) -> None:
        if entry.is_open:
            self._release_resources(entry)
        del self._entries[entry.task.id]
        owner = self._owners[entry.task.owner]
        del owner.task_ids[entry.task.id]
        owner.completions.pop(entry.task.id, None)
        owner.removed_ids[entry.task.id] = None
        if len(owner.removed_ids) > MAX_REMEMBERED_IDS:
            owner.removed_ids.popitem(last=False)
        self.counts[count_name] += 1

    def _release_resources(self, entry: TaskEntry) -> None:
        self._dequeue_task(entry)
        if entry.worker is not None and (lease := self._workers[entry.worker].leases.get(entry.task.id)):
            lease.is_void = True
        entry.worker = None
        self.held_bytes -= entry.task.num_bytes
        entry.task = replace(entry.task, payload=None)

    def _dequeue_task(self, entry: TaskEntry) -> None:
        self._waiting[entry.task.kind].discard(entry.task.id)
        self._deadlines.discard(entry.task.id)

    def _worker_leases(self, worker: str) -> dict[str, Lease]:
        holder = self._workers.get(worker)
        return {} if holder is None else holder.leases

    def _end_lease(self, worker: str, task_id: str) -> bool:
        """Remove a worker's lease. Returns True if it existed and was not void."""
        lease = self._worker_leases(worker).pop(task_id, None)
        self._stalls.discard((worker, task_id))
        return lease is not None and not lease.is_void

    def _return_lease(self, worker: str, task_id: str) -> None:
        if self._end_lease(worker, task_id):
            self._requeue_task(self._entries[task_id])

    def _oldest_waiting_task(self, kind: str) -> TaskEntry | None:
        queue = self._waiting.get(kind)
        task_id = None if queue is None else queue.peek()
        return None if task_id is None else self._entries[task_id]

    def _find_free_worker(self, entry: TaskEntry) -> str | None:
        free = [
            (name in entry.tried_workers, len(worker.leases), name)
            for name, worker in self._workers.items()
            # A worker cannot hold a task twice: it may still have a lease from an earlier attempt.
            if entry.task.kind in worker.kinds
            and worker.can_take(entry.task.rows, exclusive=entry.is_suspect)
            and entry.task.id not in worker.leases
        ]
        return min(free)[2] if free else None

    def _count_report(self, status: ReportStatus) -> ReportStatus:
        self.counts[status.name.lower()] += 1
        return status
