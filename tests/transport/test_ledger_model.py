"""The ledger under random events, with its invariants checked after each; test_agenda.py tests its queues."""

import re
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wfm_ds.transport.ledger import MAX_ATTEMPTS, Ledger, ReportStatus, Task, TaskRejected
from wfm_ds.transport.tasks import TaskState

STALL_S = 10.0
KINDS = ("a", "b")
OWNERS = ("ann", "bob")
WORKERS = {"w0": ("a",), "w1": ("a", "b"), "w2": ("b",)}
MAX_WAITING, MAX_BYTES = 8, 60

task_ids = st.integers(0, 11).map(str)
workers = st.sampled_from(sorted(WORKERS))


def check(ledger):
    """Assert the invariants of a ledger."""
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
    """Events in any order, also from faulty or malicious peers. The invariants are checked after each event."""

    def __init__(self):
        super().__init__()
        limits = {"max_waiting": MAX_WAITING, "max_bytes": MAX_BYTES}
        self.ledger = Ledger(dict.fromkeys(KINDS, STALL_S), **limits)
        self.now_s = 0.0
        self.credit = {}
        self.owner_of = {}
        self.completed = {}  # (owner, id) -> completions since the owner was last forgotten
        self.seen = dict.fromkeys(OWNERS, 0)
        self.held_by = {}  # task id -> (worker, attempt) of the live lease
        self.attempts = {}  # task id -> number of leases that ended in a failure, a stall or a death

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
            if admission:
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
        assert worker not in self.ledger._workers

    @rule(worker=workers)
    def worker_left(self, worker):
        self.returned(worker, self.ledger.remove_departed_worker(worker))
        assert worker not in self.ledger._workers

    @rule(worker=workers, ids=st.sets(task_ids, max_size=3))
    def not_sent(self, worker, ids):
        self.ledger.requeue_unsent(worker, ids)
        self.returned(worker, ids)

    def returned(self, worker, ids):
        """Remove leases that do not count as attempts."""
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

    @precondition(lambda self: self.now_s > 60.0)  # earlier, it would leave little to test
    @rule(kind=st.sampled_from(KINDS))
    def kind_down(self, kind):
        self.ledger.disable_kind(kind, f"{kind} is down")

    @invariant()
    def holds(self):
        check(self.ledger)
        self.record()
        assert all(n == 1 for n in self.completed.values()), "a task completes once"
        assert self.ledger.held_bytes <= MAX_BYTES

    def teardown(self):
        """From any state, workers that leave change nothing, and new workers finish everything."""
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
        check(self.ledger)
        assert self.ledger.held_bytes == 0
        assert not self.ledger.has_leases()


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
