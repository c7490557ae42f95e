"""The ledger under random events: what must hold after each, and that it does what a plain scan of everything does."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wfm_ds.transport.ledger import MAX_ATTEMPTS, Admission, Ledger, ReportStatus, Task, TaskRejected
from wfm_ds.transport.tasks import TaskState

STALL_S = 10.0
KINDS = ("a", "b")
OWNERS = ("ann", "bob")
WORKERS = {"w0": ("a",), "w1": ("a", "b"), "w2": ("b",)}
MAX_WAITING, MAX_BYTES = 8, 60

task_ids = st.integers(0, 11).map(str)
workers = st.sampled_from(sorted(WORKERS))


class ScanningLedger(Ledger):
    """The reference: looks at every task and every lease each time, and keeps no order but that of submission."""

    def __init__(self, stall_s, **limits):
        super().__init__(stall_s, **limits)
        self.stalled_at_s = {}  # by worker, task and attempt

    def expire_leases(self, now_s):
        stalled = []
        for name, worker in self._workers.items():
            for task_id, lease in worker.leases.items():
                key = (name, task_id, lease.attempt)
                if now_s - max(lease.progress_at_s, self.stalled_at_s.get(key, float("-inf"))) <= lease.stall_s:
                    continue
                stalled.append(key)
                self.stalled_at_s[key] = now_s
                if not lease.is_void:
                    lease.is_void = True
                    self._end_attempt(self._entries[task_id], f"no progress for {lease.stall_s:g} s", fatal=False)
        for entry in list(self._entries.values()):
            if entry.state is TaskState.WAITING and now_s > entry.task.deadline_s:
                self._finish_task(entry, TaskState.QUARANTINED, reason="; ".join(["deadline", *entry.reasons]))
        return stalled

    def new_completions(self, owner, after_seq):
        known = self._owners.get(owner)
        return [c for c in known.completions.values() if c.seq > after_seq] if known else []

    def release_completions(self, owner, up_to_seq):
        for completion in self.new_completions(owner, 0):
            if completion.seq <= up_to_seq:
                self._remove_task(self._entries[completion.id], "released")

    def forget_owner(self, owner):
        running = self.cancel_tasks(owner, [e.task.id for e in self._entries.values() if e.task.owner == owner])
        self._owners.pop(owner, None)
        return running

    def _oldest_waiting_task(self, kind):
        waiting = [e for e in self._entries.values() if e.task.kind == kind and e.state is TaskState.WAITING]
        return min(waiting, key=lambda entry: entry.order, default=None)


class Compared:
    """Two ledgers that are told the same, and must answer the same. What ends at one moment may end in any order."""

    def __init__(self, real, reference):
        self.__dict__.update(real=real, reference=reference)

    def __setattr__(self, name, value):
        setattr(self.real, name, value)
        setattr(self.reference, name, value)

    def __getattr__(self, name):
        real, reference = getattr(self.real, name), getattr(self.reference, name)
        if callable(real):
            return lambda *arguments: self.call(name, real, reference, arguments)
        assert real == reference, name
        return real

    def call(self, name, real, reference, arguments):
        answer, refusal = outcome_of(real, arguments)
        other, other_refusal = outcome_of(reference, arguments)
        assert str(refusal) == str(other_refusal)
        if refusal:
            raise refusal
        assert in_any_order(name, answer) == in_any_order(name, other)
        return answer


def outcome_of(method, arguments):
    try:
        return method(*arguments), None
    except TaskRejected as error:
        return None, error


def in_any_order(name, answer):
    if name == "new_completions":
        return sorted((replace(completion, seq=0) for completion in answer), key=lambda completion: completion.id)
    return (
        sorted(answer)
        if name in ("expire_leases", "forget_owner", "remove_lost_worker", "remove_departed_worker")
        else answer
    )


def check(ledger):
    """Assert what must hold between events."""
    states = Counter(entry.state for entry in ledger._entries.values())
    assert ledger.counts["submitted"] == len(ledger._entries) + ledger.counts["released"] + ledger.counts["cancelled"]
    assert ledger.held_bytes == sum(e.task.num_bytes for e in ledger._entries.values() if e.is_open)
    assert len(ledger._deadlines) == sum(map(len, ledger._waiting.values())) == states[TaskState.WAITING]
    assert len(ledger._stalls) == sum(len(worker.leases) for worker in ledger._workers.values())
    live = Counter()
    for name, worker in ledger._workers.items():
        for task_id, lease in worker.leases.items():
            assert (name, task_id) in ledger._stalls
            if not lease.is_void:
                live[task_id] += 1
                assert ledger._entries[task_id].worker == name
                assert ledger._entries[task_id].attempt == lease.attempt
    leased = {e.task.id for e in ledger._entries.values() if e.state is TaskState.LEASED}
    assert live == Counter(leased), "each leased task has exactly one live lease, no other has any"
    for entry in ledger._entries.values():
        assert entry.failures <= min(MAX_ATTEMPTS, entry.attempt)
        assert entry.failures < MAX_ATTEMPTS or entry.state is TaskState.QUARANTINED
        assert (entry.worker is not None) == (entry.state is TaskState.LEASED)
        waits = entry.state is TaskState.WAITING
        assert waits == (entry.task.id in ledger._deadlines) == (entry.task.id in ledger._waiting[entry.task.kind])
    for owner_id, owner in ledger._owners.items():
        seqs = [c.seq for c in owner.completions.values()]
        assert seqs == sorted(set(seqs))
        assert all(seq <= owner.last_seq for seq in seqs)
        entries = [e for e in ledger._entries.values() if e.task.owner == owner_id]
        assert owner.task_ids.keys() == {e.task.id for e in entries}
        assert {e.task.id for e in entries if not e.is_open} == owner.completions.keys()
        assert not owner.removed_ids.keys() & {e.task.id for e in entries}


class Model(RuleBasedStateMachine):
    """Events in any order, among them those of confused or malicious peers; what must hold is checked after each."""

    def __init__(self):
        super().__init__()
        limits = {"max_waiting": MAX_WAITING, "max_bytes": MAX_BYTES}
        self.real = Ledger(dict.fromkeys(KINDS, STALL_S), **limits)
        self.ledger = Compared(self.real, ScanningLedger(dict.fromkeys(KINDS, STALL_S), **limits))
        self.now_s = 0.0
        self.credit = {}
        self.owner_of = {}
        self.completed = {}  # (owner, id) -> how often, since the owner was last forgotten
        self.seen = dict.fromkeys(OWNERS, 0)
        self.held_by = {}  # task id -> worker and number of the live lease
        self.attempts = {}  # task id -> leases that ended in a failure, a stall or a death

    def spent(self, *leases):
        """Count leases that ended in a failure, a stall or a death."""
        for worker, task_id, attempt in leases:
            if self.held_by.get(task_id) == (worker, attempt):
                del self.held_by[task_id]
                self.attempts[task_id] = self.attempts.get(task_id, 0) + 1

    def record(self):
        for owner in OWNERS:
            for completion in self.ledger.new_completions(owner, self.seen[owner]):
                assert completion.seq > self.seen[owner]
                self.seen[owner] = completion.seq
                key = (owner, completion.id)
                self.completed[key] = self.completed.get(key, 0) + 1
                assert completion.ok == (not completion.reason)
                self.held_by.pop(completion.id, None)
                if completion.ok:
                    assert self.attempts[completion.id] < MAX_ATTEMPTS
                elif not re.search("down|deadline|for good", completion.reason):
                    assert self.attempts[completion.id] == MAX_ATTEMPTS

    @rule(
        task_id=task_ids,
        owner=st.sampled_from(OWNERS),
        kind=st.sampled_from([*KINDS, "?"]),
        n=st.integers(0, 20),
        patience_s=st.sampled_from([3.0, 7.0, 60.0, 600.0]),
    )
    def submit(self, task_id, owner, kind, n, patience_s):
        foreign = self.owner_of.get(task_id, owner) != owner
        try:
            admission = self.ledger.submit(
                Task(task_id, owner, kind, n, self.now_s + patience_s, payload=f"media of {task_id}")
            )
        except TaskRejected as error:
            refusal = str(error)
        else:
            refusal = ""
            if admission is Admission.NEW:
                self.owner_of[task_id] = owner
                self.attempts[task_id] = 0
                assert kind in KINDS
        assert refusal in ("", "full") or kind not in KINDS or foreign

    @rule(worker=workers, credit=st.integers(1, 3), held=st.sets(task_ids))
    def worker_up(self, worker, credit, held):
        self.ledger.register_worker(worker, frozenset(WORKERS[worker]), credit, held)
        self.credit[worker] = credit
        self.held_by = {t: lease for t, lease in self.held_by.items() if lease[0] != worker or t in held}

    @rule()
    def lease(self):
        self.lease_to(WORKERS)

    def lease_to(self, kinds):
        for grant in self.ledger.lease_tasks(self.now_s):
            assert grant.task.kind in kinds[grant.worker]
            assert grant.task.payload == f"media of {grant.task.id}"
            assert self.attempts[grant.task.id] < min(grant.attempt, MAX_ATTEMPTS)
            self.held_by[grant.task.id] = (grant.worker, grant.attempt)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3), done=st.integers(0, 3))
    def progress(self, worker, task_id, attempt, done):
        self.ledger.record_progress(worker, task_id, attempt, done, self.now_s)

    @rule(pick=st.integers(0, 11), done=st.integers(1, 9))
    def progress_of_a_live_lease(self, pick, done):
        live = sorted(self.held_by.items())
        if live:
            task_id, (worker, attempt) = live[pick % len(live)]
            self.progress(worker, task_id, attempt, done)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3))
    def result(self, worker, task_id, attempt):
        self.ledger.record_result(worker, task_id, attempt, 0.1, {"by": worker})
        self.held_by.pop(task_id, None)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3), fatal=st.booleans())
    def failed(self, worker, task_id, attempt, fatal):
        self.ledger.record_failure(worker, task_id, attempt, "for good" if fatal else "no", fatal)
        self.spent((worker, task_id, attempt))

    @rule(worker=workers)
    def worker_lost(self, worker):
        for task_id in self.ledger.remove_lost_worker(worker, "gone"):
            self.spent((worker, task_id, self.held_by.get(task_id, ("", 0))[1]))
        assert not self.ledger.has_worker(worker)

    @rule(worker=workers)
    def worker_left(self, worker):
        self.returned(worker, self.ledger.remove_departed_worker(worker))
        assert not self.ledger.has_worker(worker)

    @rule(worker=workers, ids=st.sets(task_ids, max_size=3))
    def not_sent(self, worker, ids):
        self.ledger.requeue_unsent(worker, ids)
        self.returned(worker, ids)

    def returned(self, worker, ids):
        """Leases that were no attempts."""
        self.held_by = {t: lease for t, lease in self.held_by.items() if lease[0] != worker or t not in ids}

    @rule(seconds=st.sampled_from([1.0, 2.0, 3.0, 6.0, 11.0, 70.0]))
    def expire(self, seconds):
        self.now_s += seconds
        self.spent(*self.ledger.expire_leases(self.now_s))

    @rule(owner=st.sampled_from(OWNERS), ids=st.sets(task_ids, max_size=3))
    def cancel(self, owner, ids):
        for worker, task_id in self.ledger.cancel_tasks(owner, ids):
            self.returned(worker, [task_id])

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner):
        self.record()
        self.ledger.release_completions(owner, self.seen[owner])
        assert not self.ledger.new_completions(owner, 0)

    @rule(owner=st.sampled_from(OWNERS))
    def forget(self, owner):
        for worker, task_id in self.ledger.forget_owner(owner):
            self.returned(worker, [task_id])
        self.seen[owner] = 0
        self.completed = {key: n for key, n in self.completed.items() if key[0] != owner}

    @rule(leasing=st.sampled_from([True, True, True, False]))
    def drain(self, leasing):
        self.ledger.is_leasing = leasing

    @precondition(lambda self: self.now_s > 60.0)  # nothing much happens afterwards
    @rule(kind=st.sampled_from(KINDS))
    def kind_down(self, kind):
        self.ledger.disable_kind(kind, f"{kind} is down")

    @invariant()
    def holds(self):
        check(self.real)
        self.record()
        assert all(n == 1 for n in self.completed.values()), "a task completes once"
        assert self.ledger.held_bytes <= MAX_BYTES

    def teardown(self):
        """End from any state: workers that leave change nothing, and fresh ones finish everything."""
        self.drain(True)
        for worker in WORKERS:
            self.worker_lost(worker)
        for _ in range(MAX_ATTEMPTS):
            self.ledger.register_worker("leaving", frozenset(KINDS), 12, ())
            self.lease_to({"leaving": KINDS})
            self.returned("leaving", self.ledger.remove_departed_worker("leaving"))
            self.holds()
        self.ledger.register_worker("fresh", frozenset(KINDS), 2, ())
        while grants := self.ledger.lease_tasks(self.now_s):
            for grant in grants:
                assert (
                    self.ledger.record_result("fresh", grant.task.id, grant.attempt, 0.1, {}) is ReportStatus.ACCEPTED
                )
        check(self.real)
        assert self.ledger.held_bytes == 0
        assert not self.ledger.has_leases()


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_tasks_stall_and_run_out_of_time_as_a_scan_says(seed):
    """Events that happen often in a run, so that times decide: leases are renewed, stall, and tasks wait too long."""
    draw = random.Random(seed)
    limits = {"max_waiting": 1000, "max_bytes": 10**6}
    stall_s = dict.fromkeys(KINDS, STALL_S)
    ledger = Compared(Ledger(stall_s, **limits), ScanningLedger(stall_s, **limits))
    now_s, leases = 0.0, []
    for number in range(800):
        now_s += draw.choice([0.0, 0.25, 0.5, 1.0])
        ledger.submit(Task(str(number), "ann", draw.choice(KINDS), 1, now_s + draw.choice([5.0, 20.0, 80.0])))
        if number % 40 == 0:
            ledger.register_worker(f"w{number}", frozenset(KINDS), 4, ())
        leases += [(grant.worker, grant.task.id, grant.attempt) for grant in ledger.lease_tasks(now_s)]
        for lease in draw.sample(leases, min(3, len(leases))):
            ledger.record_progress(*lease, draw.randrange(5), now_s)
        if leases and draw.random() < 0.5:
            ledger.record_result(*leases.pop(draw.randrange(len(leases))), 0.1, {})
        ledger.expire_leases(now_s)
        ledger.new_completions("ann", 0)
        if number % 25 == 0:
            ledger.release_completions("ann", max((c.seq for c in ledger.new_completions("ann", 0)), default=0))
            check(ledger.real)
    assert {"done", "quarantined", "requeued", "late", "released"} <= ledger.counts.keys()
