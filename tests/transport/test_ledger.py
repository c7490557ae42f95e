"""Each rule of the state machine by itself; test_ledger_model.py tests them with random events."""

from dataclasses import replace

import pytest

from wfm_ds.transport.ledger import MAX_ATTEMPTS, Ledger, ReportStatus, Task, TaskRejected

STALL_S = 10.0
KINDS = ("a", "b")


def a_task(task_id, owner="ann", kind="a", num_bytes=5, deadline_s=1e9):
    return Task(task_id, owner, kind, num_bytes, deadline_s, payload=f"media of {task_id}")


def a_ledger(**limits):
    return Ledger(dict.fromkeys(KINDS, STALL_S), **({"max_waiting": 100, "max_bytes": 1000} | limits))


def up(ledger, worker="w0", kinds=KINDS, credit=1, held=()):
    ledger.register_worker(worker, frozenset(kinds), credit, held)


def holding(*task_ids, **limits):
    """Return a ledger in which worker w0 has leased these tasks."""
    ledger = a_ledger(**limits)
    up(ledger, credit=max(1, len(task_ids)))
    for task_id in task_ids:
        ledger.submit(a_task(task_id))
    assert len(leased(ledger)) == len(task_ids)
    return ledger


def leased(ledger, now_s=0.0):
    return [(g.worker, g.task.id, g.attempt) for g in ledger.lease_tasks(now_s)]


def finished(ledger, owner="ann", after=0):
    return [(c.id, c.ok, c.reason) for c in ledger.new_completions(owner, after)]


def test_a_task_is_leased_once_in_submit_order_within_credit():
    ledger = a_ledger()
    for i in range(4):
        assert ledger.submit(a_task(str(i)))
    assert not ledger.submit(a_task("2"))
    up(ledger, credit=3)
    assert leased(ledger) == [("w0", "0", 1), ("w0", "1", 1), ("w0", "2", 1)]
    assert leased(ledger) == []
    assert ledger.record_result("w0", "1", 1, 0.5, {"x": 1}) is ReportStatus.ACCEPTED
    assert leased(ledger) == [("w0", "3", 1)]
    assert finished(ledger) == [("1", True, "")]


def test_the_first_result_counts_and_duplicates_are_recognized():
    ledger = holding("t")
    assert ledger.record_result("w0", "t", 1, 0.5, {"n": 1}) is ReportStatus.ACCEPTED
    assert ledger.record_result("w0", "t", 1, 0.5, {"n": 2}) is ReportStatus.DUPLICATE
    assert ledger.new_completions("ann", 0)[0].meta == {"n": 1}
    ledger.release_completions("ann", 1)
    assert ledger.record_result("w0", "t", 1, 0.5, {"n": 3}) is ReportStatus.DUPLICATE
    assert not ledger.submit(a_task("t"))
    assert ledger.record_result("w0", "never", 1, 0.5, {}) is ReportStatus.UNKNOWN
    assert finished(ledger) == []


def test_a_stalled_task_moves_and_its_worker_gets_no_task_until_it_reports():
    ledger = holding("t")
    assert ledger.expire_leases(STALL_S) == []
    assert ledger.expire_leases(STALL_S + 0.1) == [("w0", "t", 1)]
    assert ledger.expire_leases(STALL_S + 0.2) == []
    assert leased(ledger) == [], "the only worker hangs"
    up(ledger, "w1")
    assert leased(ledger, 20.0) == [("w1", "t", 2)]
    assert ledger.record_result("w0", "t", 1, 9.0, {}) is ReportStatus.LATE
    assert finished(ledger) == [("t", True, "")]
    ledger.submit(a_task("u"))
    assert leased(ledger) == [("w0", "u", 1)], "it has reported; w1 still works on t"


def test_a_stalled_worker_is_notified_after_each_stall():
    for cancelled in ([], ["t"]):
        ledger = holding("t")
        ledger.cancel_tasks("ann", cancelled)
        assert [now_s for now_s in range(35) if ledger.expire_leases(now_s)] == [11, 22, 33]
        assert ledger.counts["requeued"] == 1 - len(cancelled), "the task moves once"


def test_a_failure_of_an_earlier_lease_does_not_affect_the_current_one():
    ledger = holding("t")
    assert ledger.record_failure("w0", "t", 1, "no luck", fatal=False) is ReportStatus.ACCEPTED
    assert leased(ledger) == [("w0", "t", 2)]
    assert ledger.record_failure("w0", "t", 1, "no luck", fatal=True) is ReportStatus.DUPLICATE
    assert ledger.record_result("w0", "t", 2, 0.1, {}) is ReportStatus.ACCEPTED


def test_only_growing_progress_renews_a_lease():
    ledger = holding("t")
    ledger.record_progress("w0", "t", 1, 1, 8.0)
    assert ledger.expire_leases(17.0) == []
    ledger.record_progress("w0", "t", 1, 1, 17.0)
    ledger.record_progress("w0", "t", 2, 5, 17.0)
    ledger.record_progress("w1", "t", 1, 5, 17.0)
    assert ledger.expire_leases(18.1) == [("w0", "t", 1)]


def test_a_task_that_kills_its_workers_is_quarantined_with_the_reasons():
    ledger = a_ledger()
    ledger.submit(a_task("poison"))
    ledger.submit(a_task("good"))
    for life in range(MAX_ATTEMPTS):
        up(ledger, f"w{life}")
        assert leased(ledger) == [(f"w{life}", "poison", life + 1)], "requeued at its old place"
        assert ledger.remove_lost_worker(f"w{life}", f"killed by signal {life % 2}") == ["poison"]
    assert finished(ledger) == [("poison", False, "killed by signal 0; killed by signal 1 (3 attempts)")]
    up(ledger, "w9")
    assert leased(ledger) == [("w9", "good", 1)]


def test_tasks_that_were_never_sent_wait_again_without_an_attempt():
    ledger = holding("a", "b", "c")
    ledger.requeue_unsent("w0", ["a", "unknown"])
    assert ledger.remove_lost_worker("w0", "killed") == ["b", "c"]
    up(ledger, "w1", credit=3)
    assert leased(ledger) == [("w1", "a", 2)], "b is suspected: it is held alone"


def test_a_second_attempt_prefers_another_worker():
    ledger = a_ledger()
    up(ledger, "w0")
    up(ledger, "w1")
    ledger.submit(a_task("t"))
    assert leased(ledger) == [("w0", "t", 1)]
    ledger.record_failure("w0", "t", 1, "no luck", fatal=False)
    assert leased(ledger) == [("w1", "t", 2)]
    ledger.record_failure("w1", "t", 2, "hopeless", fatal=True)
    assert finished(ledger) == [("t", False, "no luck; hopeless (2 attempts)")]


def test_credit_counts_rows_and_allows_one_task_of_any_size():
    ledger = a_ledger()
    up(ledger, credit=4)
    for task_id, rows in (("a", 3), ("b", 2), ("c", 1)):
        ledger.submit(replace(a_task(task_id), rows=rows))
    assert leased(ledger) == [("w0", "a", 1)], "b does not fit beside a, and c is younger than b"
    ledger.record_result("w0", "a", 1, 0.1, {})
    assert leased(ledger) == [("w0", "b", 1), ("w0", "c", 1)]
    up(ledger, "w1", credit=1)
    ledger.submit(replace(a_task("large"), rows=9))
    assert leased(ledger) == [("w1", "large", 1)]


def test_suspected_tasks_are_retried_alone():
    ledger = holding("a", "b", "c")
    ledger.remove_lost_worker("w0", "killed")
    up(ledger, "w1", credit=3)
    for task_id in "abc":
        assert leased(ledger) == [("w1", task_id, 2)]
        ledger.submit(a_task(f"{task_id}-later"))
        assert leased(ledger) == [], "nothing is put beside it"
        ledger.record_result("w1", task_id, 2, 0.1, {})
    assert [g[1] for g in leased(ledger)] == ["a-later", "b-later", "c-later"]


def test_each_task_kind_can_have_its_own_limit():
    ledger = a_ledger(max_waiting=3, max_waiting_by_kind={"a": 1})
    up(ledger)
    ledger.submit(a_task("a1"))
    with pytest.raises(TaskRejected, match=r"^full$"):
        ledger.submit(a_task("a2"))
    ledger.submit(a_task("b1", kind="b"))
    ledger.submit(a_task("b2", kind="b"))
    with pytest.raises(TaskRejected, match=r"^full$"):
        ledger.submit(a_task("b3", kind="b"))
    assert ledger.summarize_load(0.0) == ({"a": (1, 0), "b": (2, 0)}, {"w0": None})
    assert leased(ledger) == [("w0", "a1", 1)]
    assert ledger.submit(a_task("a2"))
    assert ledger.summarize_load(7.0) == ({"a": (1, 1), "b": (2, 0)}, {"w0": 7.0})


def test_watchers_get_each_outcome_once_with_its_payload():
    heard = []
    ledger = a_ledger(on_end=lambda task, completion: heard.append((task.payload, completion.ok, completion.reason)))
    up(ledger)
    for task_id in "ab":
        ledger.submit(a_task(task_id))
    leased(ledger)
    ledger.record_result("w0", "a", 1, 0.1, {})
    ledger.record_result("w0", "a", 1, 0.1, {})
    leased(ledger)
    ledger.record_failure("w0", "b", 1, "broken", fatal=True)
    ledger.release_completions("ann", 2)
    assert heard == [("media of a", True, ""), ("media of b", False, "broken")]


def test_a_cancelled_task_keeps_its_worker_busy_until_it_reports():
    ledger = holding("t")
    assert ledger.cancel_tasks("bob", ["t"]) == [], "not his"
    assert ledger.cancel_tasks("ann", ["t", "unknown"]) == [("w0", "t")]
    assert ledger.held_bytes == 0
    ledger.submit(a_task("u"))
    assert leased(ledger) == []
    assert ledger.record_result("w0", "t", 1, 0.1, {}) is ReportStatus.DUPLICATE
    assert leased(ledger) == [("w0", "u", 1)]
    assert finished(ledger) == []


def test_refusals_have_a_reason():
    ledger = a_ledger(max_waiting=2, max_bytes=12)
    with pytest.raises(TaskRejected, match=r"unknown task kind c; available: a, b"):
        ledger.submit(a_task("t", kind="c"))
    with pytest.raises(TaskRejected, match=r"task too large: 13 bytes, limit 12"):
        ledger.submit(a_task("t", num_bytes=13))
    ledger.submit(a_task("t", num_bytes=10))
    with pytest.raises(TaskRejected, match=r"^full$"):
        ledger.submit(a_task("u", num_bytes=3))
    with pytest.raises(TaskRejected, match=r"another client"):
        ledger.submit(a_task("t", owner="bob"))
    ledger.submit(a_task("u", num_bytes=1))
    with pytest.raises(TaskRejected, match=r"^full$"):
        ledger.submit(a_task("v", num_bytes=0))
    up(ledger)
    leased(ledger)
    ledger.record_result("w0", "t", 1, 0.1, {})
    assert ledger.submit(a_task("v", num_bytes=3))


def test_tasks_of_a_kind_that_is_down_fail_at_once():
    ledger = a_ledger()
    ledger.submit(a_task("waits"))
    ledger.disable_kind("a", "reward a is down")
    ledger.submit(a_task("comes later"))
    ledger.submit(a_task("other", kind="b"))
    assert finished(ledger) == [("waits", False, "reward a is down"), ("comes later", False, "reward a is down")]


def test_a_deadline_ends_waiting_tasks():
    ledger = a_ledger()
    ledger.submit(a_task("t", deadline_s=5.0))
    ledger.expire_leases(4.9)
    assert finished(ledger) == []
    ledger.expire_leases(5.1)
    assert finished(ledger) == [("t", False, "deadline")]


def test_nothing_is_leased_while_draining():
    ledger = a_ledger()
    up(ledger)
    ledger.submit(a_task("t"))
    ledger.is_leasing = False
    assert leased(ledger) == []
