"""The state machine under random events, and each of its rules by itself."""

import re
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wfm_ds.pipes.ledger import MAX_ATTEMPTS, Admission, Ledger, Refused, Task, Verdict

STALL_S = 10.0
KINDS = ("a", "b")
OWNERS = ("ann", "bob")
WORKERS = {"w0": ("a",), "w1": ("a", "b"), "w2": ("b",)}
MAX_WAITING, MAX_BYTES = 8, 60

task_ids = st.integers(0, 11).map(str)
workers = st.sampled_from(sorted(WORKERS))


def a_task(task_id, owner="ann", kind="a", num_bytes=5, deadline_s=1e9):
    return Task(task_id, owner, kind, num_bytes, deadline_s, payload=f"media of {task_id}")


def a_ledger(**limits):
    return Ledger(dict.fromkeys(KINDS, STALL_S), **({"max_waiting": 100, "max_bytes": 1000} | limits))


def up(ledger, worker="w0", kinds=KINDS, credit=1, held=()):
    ledger.worker_up(worker, frozenset(kinds), credit, held)


def leased(ledger, now_s=0.0):
    return [(g.worker, g.task.id, g.attempt) for g in ledger.lease(now_s)]


def finished(ledger, owner="ann", after=0):
    return [(c.id, c.ok, c.reason) for c in ledger.completions(owner, after)]


class Model(RuleBasedStateMachine):
    """Events in any order, among them those of confused or malicious peers; what must hold is checked after each."""

    def __init__(self):
        super().__init__()
        self.ledger = a_ledger(max_waiting=MAX_WAITING, max_bytes=MAX_BYTES)
        self.now_s = 0.0
        self.credit = {}
        self.owner_of = {}
        self.completed = {}  # (owner, id) -> how often, since the owner was last forgotten
        self.seen = dict.fromkeys(OWNERS, 0)
        self.held_by = {}  # task id -> worker and number of the live lease
        self.attempts = {}  # task id -> leases that ended in a failure, a stall or a death

    def spent(self, *leases):
        """These ended so."""
        for worker, task_id, attempt in leases:
            if self.held_by.get(task_id) == (worker, attempt):
                del self.held_by[task_id]
                self.attempts[task_id] = self.attempts.get(task_id, 0) + 1

    def record(self):
        for owner in OWNERS:
            for completion in self.ledger.completions(owner, self.seen[owner]):
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

    @rule(task_id=task_ids, owner=st.sampled_from(OWNERS), kind=st.sampled_from([*KINDS, "?"]), n=st.integers(0, 20))
    def submit(self, task_id, owner, kind, n):
        foreign = self.owner_of.get(task_id, owner) != owner
        try:
            admission = self.ledger.submit(a_task(task_id, owner, kind, n, self.now_s + 60))
        except Refused as error:
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
        self.ledger.worker_up(worker, frozenset(WORKERS[worker]), credit, held)
        self.credit[worker] = credit
        self.held_by = {t: lease for t, lease in self.held_by.items() if lease[0] != worker or t in held}

    @rule()
    def lease(self):
        self.lease_to(WORKERS)

    def lease_to(self, kinds):
        for grant in self.ledger.lease(self.now_s):
            assert grant.task.kind in kinds[grant.worker]
            assert grant.task.payload == f"media of {grant.task.id}"
            assert self.attempts[grant.task.id] < min(grant.attempt, MAX_ATTEMPTS)
            self.held_by[grant.task.id] = (grant.worker, grant.attempt)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3), done=st.integers(0, 3))
    def progress(self, worker, task_id, attempt, done):
        self.ledger.progress(worker, task_id, attempt, done, self.now_s)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3))
    def result(self, worker, task_id, attempt):
        self.ledger.result(worker, task_id, attempt, 0.1, {"by": worker})
        self.held_by.pop(task_id, None)

    @rule(worker=workers, task_id=task_ids, attempt=st.integers(1, 3), fatal=st.booleans())
    def failed(self, worker, task_id, attempt, fatal):
        self.ledger.failed(worker, task_id, attempt, "for good" if fatal else "no", fatal)
        self.spent((worker, task_id, attempt))

    @rule(worker=workers)
    def worker_lost(self, worker):
        for task_id in self.ledger.worker_lost(worker, "gone"):
            self.spent((worker, task_id, self.held_by.get(task_id, ("", 0))[1]))
        assert not self.ledger.knows_worker(worker)

    @rule(worker=workers)
    def worker_left(self, worker):
        self.returned(worker, self.ledger.worker_left(worker))
        assert not self.ledger.knows_worker(worker)

    @rule(worker=workers, ids=st.sets(task_ids, max_size=3))
    def not_sent(self, worker, ids):
        self.ledger.not_sent(worker, ids)
        self.returned(worker, ids)

    def returned(self, worker, ids):
        """Leases that were no attempts."""
        self.held_by = {t: lease for t, lease in self.held_by.items() if lease[0] != worker or t not in ids}

    @rule(seconds=st.sampled_from([0.5, 6.0, 11.0, 70.0]))
    def expire(self, seconds):
        self.now_s += seconds
        self.spent(*self.ledger.expire(self.now_s))

    @rule(owner=st.sampled_from(OWNERS), ids=st.sets(task_ids, max_size=3))
    def cancel(self, owner, ids):
        for worker, task_id in self.ledger.cancel(owner, ids):
            self.returned(worker, [task_id])

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner):
        self.record()
        self.ledger.release(owner, self.seen[owner])
        assert not self.ledger.completions(owner, 0)

    @rule(owner=st.sampled_from(OWNERS))
    def forget(self, owner):
        for worker, task_id in self.ledger.forget(owner):
            self.returned(worker, [task_id])
        self.seen[owner] = 0
        self.completed = {key: n for key, n in self.completed.items() if key[0] != owner}

    @rule(kind=st.sampled_from(KINDS))
    def kind_down(self, kind):
        self.ledger.kind_down(kind, f"{kind} is down")

    @invariant()
    def holds(self):
        self.ledger.check()
        self.record()
        assert all(n == 1 for n in self.completed.values()), "a task completes once"
        assert self.ledger.held_bytes <= MAX_BYTES

    def teardown(self):
        """From any state, workers that leave change nothing and fresh ones bring everything to an end."""
        for worker in WORKERS:
            self.worker_lost(worker)
        for _ in range(MAX_ATTEMPTS):
            self.ledger.worker_up("leaving", frozenset(KINDS), 12, ())
            self.lease_to({"leaving": KINDS})
            self.returned("leaving", self.ledger.worker_left("leaving"))
            self.holds()
        self.ledger.worker_up("fresh", frozenset(KINDS), 2, ())
        while grants := self.ledger.lease(self.now_s):
            for grant in grants:
                assert self.ledger.result("fresh", grant.task.id, grant.attempt, 0.1, {}) is Verdict.ACCEPTED
        self.ledger.check()
        assert self.ledger.held_bytes == 0
        assert not self.ledger.has_leases()


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_task_is_leased_once_in_submit_order_within_credit():
    ledger = a_ledger()
    for i in range(4):
        assert ledger.submit(a_task(str(i))) is Admission.NEW
    assert ledger.submit(a_task("2")) is Admission.KNOWN
    up(ledger, credit=3)
    assert leased(ledger) == [("w0", "0", 1), ("w0", "1", 1), ("w0", "2", 1)]
    assert leased(ledger) == []
    assert ledger.result("w0", "1", 1, 0.5, {"x": 1}) is Verdict.ACCEPTED
    assert leased(ledger) == [("w0", "3", 1)]
    assert finished(ledger) == [("1", True, "")]


def test_the_first_result_wins_and_others_are_recognised():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    up(ledger)
    leased(ledger)
    assert ledger.result("w0", "t", 1, 0.5, {"n": 1}) is Verdict.ACCEPTED
    assert ledger.result("w0", "t", 1, 0.5, {"n": 2}) is Verdict.DUPLICATE
    assert ledger.completions("ann", 0)[0].meta == {"n": 1}
    ledger.release("ann", 1)
    assert ledger.result("w0", "t", 1, 0.5, {"n": 3}) is Verdict.DUPLICATE
    assert ledger.submit(a_task("t")) is Admission.KNOWN
    assert ledger.result("w0", "never", 1, 0.5, {}) is Verdict.UNKNOWN
    assert finished(ledger) == []


def test_a_stalled_lease_moves_but_its_worker_gets_nothing_more_until_it_reports():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    up(ledger)
    leased(ledger)
    assert ledger.expire(STALL_S) == []
    assert ledger.expire(STALL_S + 0.1) == [("w0", "t", 1)]
    assert ledger.expire(STALL_S + 0.2) == []
    assert leased(ledger) == [], "the only worker hangs"
    up(ledger, "w1")
    assert leased(ledger, 20.0) == [("w1", "t", 2)]
    assert ledger.result("w0", "t", 1, 9.0, {}) is Verdict.LATE
    assert finished(ledger) == [("t", True, "")]
    ledger.submit(a_task("u"))
    assert leased(ledger) == [("w0", "u", 1)], "it has reported; w1 still works on t"


def test_a_worker_is_told_again_that_it_hangs_after_each_stall():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    up(ledger)
    leased(ledger)
    told = [now_s for now_s in range(35) if ledger.expire(now_s)]
    assert told == [11, 22, 33]
    assert ledger.counts["requeued"] == 1, "but the task moves once"


def test_a_failure_of_an_earlier_lease_says_nothing_about_this_one():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    up(ledger)
    leased(ledger)
    assert ledger.failed("w0", "t", 1, "no luck", fatal=False) is Verdict.ACCEPTED
    assert leased(ledger) == [("w0", "t", 2)]
    assert ledger.failed("w0", "t", 1, "no luck", fatal=True) is Verdict.DUPLICATE
    assert ledger.result("w0", "t", 2, 0.1, {}) is Verdict.ACCEPTED


def test_only_growing_progress_renews_a_lease():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    up(ledger)
    leased(ledger)
    ledger.progress("w0", "t", 1, 1, 8.0)
    assert ledger.expire(17.0) == []
    ledger.progress("w0", "t", 1, 1, 17.0)
    ledger.progress("w0", "t", 2, 5, 17.0)
    ledger.progress("w1", "t", 1, 5, 17.0)
    assert ledger.expire(18.1) == [("w0", "t", 1)]


def test_a_task_that_kills_its_workers_is_quarantined_with_the_reasons():
    ledger = a_ledger()
    ledger.submit(a_task("poison"))
    ledger.submit(a_task("good"))
    for life in range(MAX_ATTEMPTS):
        up(ledger, f"w{life}")
        assert leased(ledger) == [(f"w{life}", "poison", life + 1)], "requeued at its old place"
        assert ledger.worker_lost(f"w{life}", f"killed by signal {life % 2}") == ["poison"]
    assert finished(ledger) == [("poison", False, "killed by signal 0; killed by signal 1 (3 attempts)")]
    up(ledger, "w9")
    assert leased(ledger) == [("w9", "good", 1)]


def test_workers_that_leave_cost_a_task_nothing():
    ledger = a_ledger()
    ledger.submit(a_task("t"))
    for life in range(5 * MAX_ATTEMPTS):
        up(ledger, f"w{life}")
        assert leased(ledger) == [(f"w{life}", "t", life + 1)]
        assert ledger.worker_left(f"w{life}") == ["t"]
    for death in range(MAX_ATTEMPTS):
        assert finished(ledger) == []
        up(ledger, f"x{death}")
        assert [grant[1] for grant in leased(ledger)] == ["t"]
        ledger.worker_lost(f"x{death}", "killed")
    assert finished(ledger) == [("t", False, "killed (3 attempts)")]


def test_what_was_never_sent_waits_again_unsuspected():
    ledger = a_ledger()
    up(ledger, credit=3)
    for task_id in "abc":
        ledger.submit(a_task(task_id))
    assert len(leased(ledger)) == 3
    ledger.not_sent("w0", ["a", "unknown"])
    assert ledger.worker_lost("w0", "killed") == ["b", "c"]
    up(ledger, "w1", credit=3)
    assert leased(ledger) == [("w1", "a", 2)], "b is suspected: it is held alone"


def test_another_worker_is_preferred_for_another_attempt():
    ledger = a_ledger()
    up(ledger, "w0")
    up(ledger, "w1")
    ledger.submit(a_task("t"))
    assert leased(ledger) == [("w0", "t", 1)]
    ledger.failed("w0", "t", 1, "no luck", fatal=False)
    assert leased(ledger) == [("w1", "t", 2)]
    ledger.failed("w1", "t", 2, "hopeless", fatal=True)
    assert finished(ledger) == [("t", False, "no luck; hopeless (2 attempts)")]


def test_credit_counts_rows_and_one_task_however_large_is_always_given():
    ledger = a_ledger()
    up(ledger, credit=4)
    for task_id, rows in (("a", 3), ("b", 2), ("c", 1)):
        ledger.submit(replace(a_task(task_id), rows=rows))
    assert leased(ledger) == [("w0", "a", 1)], "b does not fit beside a, and c is younger than b"
    ledger.result("w0", "a", 1, 0.1, {})
    assert leased(ledger) == [("w0", "b", 1), ("w0", "c", 1)]
    up(ledger, "w1", credit=1)
    ledger.submit(replace(a_task("large"), rows=9))
    assert leased(ledger) == [("w1", "large", 1)]


def test_what_may_have_killed_a_worker_is_tried_again_alone():
    ledger = a_ledger()
    up(ledger, credit=3)
    for task_id in "abc":
        ledger.submit(a_task(task_id))
    assert len(leased(ledger)) == 3
    ledger.worker_lost("w0", "killed")
    up(ledger, "w1", credit=3)
    for task_id in "abc":
        assert leased(ledger) == [("w1", task_id, 2)]
        ledger.submit(a_task(f"{task_id}-later"))
        assert leased(ledger) == [], "nothing is put beside it"
        ledger.result("w1", task_id, 2, 0.1, {})
    assert [g[1] for g in leased(ledger)] == ["a-later", "b-later", "c-later"]


def test_each_kind_may_have_a_limit_of_its_own():
    ledger = a_ledger(max_waiting=3, max_waiting_of={"a": 1})
    up(ledger)
    ledger.submit(a_task("a1"))
    with pytest.raises(Refused, match=r"^full$"):
        ledger.submit(a_task("a2"))
    ledger.submit(a_task("b1", kind="b"))
    ledger.submit(a_task("b2", kind="b"))
    with pytest.raises(Refused, match=r"^full$"):
        ledger.submit(a_task("b3", kind="b"))
    assert ledger.census(0.0) == ({"a": (1, 0), "b": (2, 0)}, {"w0": None})
    assert leased(ledger) == [("w0", "a1", 1)]
    assert ledger.submit(a_task("a2")) is Admission.NEW
    assert ledger.census(7.0) == ({"a": (1, 1), "b": (2, 0)}, {"w0": 7.0})


def test_who_watches_hears_of_each_end_once_with_the_payload():
    heard = []
    ledger = a_ledger(on_end=lambda task, completion: heard.append((task.payload, completion.ok, completion.reason)))
    up(ledger)
    for task_id in "ab":
        ledger.submit(a_task(task_id))
    leased(ledger)
    ledger.result("w0", "a", 1, 0.1, {})
    ledger.result("w0", "a", 1, 0.1, {})
    leased(ledger)
    ledger.failed("w0", "b", 1, "broken", fatal=True)
    ledger.release("ann", 2)
    assert heard == [("media of a", True, ""), ("media of b", False, "broken")]


def test_a_task_that_did_not_arrive_is_leased_again_when_its_worker_says_hello():
    ledger = a_ledger()
    up(ledger, credit=2)
    ledger.submit(a_task("lost"))
    ledger.submit(a_task("kept"))
    leased(ledger)
    up(ledger, credit=2, held=["kept"])
    assert leased(ledger) == [("w0", "lost", 2)]


def test_a_cancelled_task_keeps_its_worker_busy_until_it_reports():
    ledger = a_ledger()
    up(ledger)
    ledger.submit(a_task("t"))
    leased(ledger)
    assert ledger.cancel("bob", ["t"]) == [], "not his"
    assert ledger.cancel("ann", ["t", "unknown"]) == [("w0", "t")]
    assert ledger.held_bytes == 0
    ledger.submit(a_task("u"))
    assert leased(ledger) == []
    assert ledger.result("w0", "t", 1, 0.1, {}) is Verdict.DUPLICATE
    assert leased(ledger) == [("w0", "u", 1)]
    assert finished(ledger) == []


def test_a_worker_that_hangs_in_a_cancelled_task_is_still_noticed():
    ledger = a_ledger()
    up(ledger)
    ledger.submit(a_task("t"))
    leased(ledger)
    ledger.cancel("ann", ["t"])
    assert ledger.expire(STALL_S + 0.1) == [("w0", "t", 1)]
    assert ledger.expire(STALL_S + 0.2) == []


def test_refusals_say_why():
    ledger = a_ledger(max_waiting=2, max_bytes=12)
    with pytest.raises(Refused, match=r"no worker does c; known are a, b"):
        ledger.submit(a_task("t", kind="c"))
    with pytest.raises(Refused, match=r"13 bytes, this hub holds 12"):
        ledger.submit(a_task("t", num_bytes=13))
    ledger.submit(a_task("t", num_bytes=10))
    with pytest.raises(Refused, match=r"^full$"):
        ledger.submit(a_task("u", num_bytes=3))
    with pytest.raises(Refused, match=r"another client"):
        ledger.submit(a_task("t", owner="bob"))
    ledger.submit(a_task("u", num_bytes=1))
    with pytest.raises(Refused, match=r"^full$"):
        ledger.submit(a_task("v", num_bytes=0))
    up(ledger)
    leased(ledger)
    ledger.result("w0", "t", 1, 0.1, {})
    assert ledger.submit(a_task("v", num_bytes=3)) is Admission.NEW


def test_a_kind_that_is_down_fails_at_once_by_name():
    ledger = a_ledger()
    ledger.submit(a_task("waits"))
    ledger.kind_down("a", "reward a is down")
    ledger.submit(a_task("comes later"))
    ledger.submit(a_task("other", kind="b"))
    assert finished(ledger) == [("waits", False, "reward a is down"), ("comes later", False, "reward a is down")]


def test_a_deadline_ends_what_waits():
    ledger = a_ledger()
    ledger.submit(a_task("t", deadline_s=5.0))
    ledger.expire(4.9)
    assert finished(ledger) == []
    ledger.expire(5.1)
    assert finished(ledger) == [("t", False, "deadline")]


def test_a_submitter_that_starts_anew_may_use_its_ids_again():
    ledger = a_ledger()
    up(ledger)
    ledger.submit(a_task("t"))
    leased(ledger)
    ledger.result("w0", "t", 1, 0.1, {})
    ledger.release("ann", 1)
    ledger.forget("ann")
    assert ledger.submit(a_task("t")) is Admission.NEW


def test_nothing_is_leased_while_draining():
    ledger = a_ledger()
    up(ledger)
    ledger.submit(a_task("t"))
    ledger.leasing = False
    assert leased(ledger) == []
