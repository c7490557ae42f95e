"""Which rank is blamed if a run fails: from a history of the ranks' messages to a one-line report."""

import math

import pytest

from wfm_ds.distributed.fault import SETTLE_S, RankStates

SILENT_S, STUCK_S, AWAKE_S = 45.0, 600.0, 10.0


@pytest.fixture
def states():
    """Return the states of three ranks that joined at second 0 and started one operation, without suspension checks."""
    return joined(awake_s=math.inf)


def joined(awake_s):
    states = RankStates(3, silent_s=SILENT_S, stuck_s=STUCK_S, max_gap_s=awake_s)
    for rank in range(3):
        states.add_rank(rank, f"process {100 + rank} on node-{rank}", 0.0)
        states.record_beat(rank, 1, 0, "a barrier", 0.0)
    return states


def beats(states, now_s, begun):
    for rank, count in begun.items():
        states.record_beat(rank, count, 0, "a forward" if count > 1 else "a barrier", now_s)


def test_ranks_with_heartbeats_and_progress_are_not_blamed(states):
    for now_s in range(0, 5000, 5):
        beats(states, now_s, {0: now_s, 1: now_s, 2: now_s})
        assert states.find_fault(now_s) is None


def test_a_closed_connection_is_blamed_after_the_settling_time(states):
    states.record_failure(0, "RuntimeError: Connection closed by peer", True, 10.0)
    states.record_disconnect(2, "its connection closed", 10.5)
    assert states.find_fault(10.0 + SETTLE_S / 2) is None
    fault = states.find_fault(10.0 + SETTLE_S)
    assert fault.ranks == (2,)
    assert fault.text == "rank 2 (process 102 on node-2) is gone: its connection closed; last seen at a barrier"


def test_the_original_failure_is_blamed_before_its_consequences(states):
    states.record_failure(0, "RuntimeError: Connection closed by peer", True, 10.0)
    states.record_failure(1, "ZeroDivisionError: division by zero", False, 10.2)
    states.record_disconnect(1, "its connection closed", 10.3)  # its failure was already recorded
    fault = states.find_fault(10.0 + SETTLE_S)
    assert fault.text == "rank 1 (process 101 on node-1) failed: ZeroDivisionError: division by zero"


def test_a_silent_node_is_blamed_in_one_sentence(states):
    beats(states, SILENT_S, {0: 1})
    assert states.find_fault(SILENT_S) is None
    beats(states, SILENT_S + 1, {0: 1})
    assert states.find_fault(SILENT_S + 1) is None  # within the settling time
    fault = states.find_fault(SILENT_S + 1 + SETTLE_S)
    assert fault.ranks == (1, 2)
    assert "rank 2 (process 102 on node-2) are gone: no sign of life for 46 s" in fault.text


def test_of_ranks_without_progress_the_one_with_the_fewest_started_operations_is_stuck(states):
    beats(states, 100.0, {0: 7, 1: 6, 2: 7})
    for now_s in (300.0, 100.0 + STUCK_S):
        beats(states, now_s, {0: 7, 1: 6, 2: 7})
        assert states.find_fault(now_s) is None
    beats(states, 101.0 + STUCK_S, {0: 7, 1: 6, 2: 7})
    fault = states.find_fault(101.0 + STUCK_S)
    assert (fault.ranks, fault.stuck) == ((1,), True)
    assert fault.text == (
        "rank 1 (process 101 on node-1) is stuck: no progress for 601 s at a forward; the other ranks wait for it"
    )


def test_progress_within_an_operation_restarts_the_time_limit(states):
    beats(states, 1.0, {0: 7, 1: 6, 2: 7})
    states.record_beat(1, 6, 900, "a scan", STUCK_S)
    beats(states, 2.0 + STUCK_S, {0: 7, 2: 7})
    states.record_beat(1, 6, 900, "a scan", 2.0 + STUCK_S)
    assert states.find_fault(2.0 + STUCK_S) is None
    beats(states, 1.0 + 2 * STUCK_S, {0: 7, 2: 7})
    states.record_beat(1, 6, 900, "a scan", 1.0 + 2 * STUCK_S)
    fault = states.find_fault(1.0 + 2 * STUCK_S)
    assert (fault.ranks, fault.stuck) == ((1,), True)
    assert "no progress for 601 s at a scan" in fault.text


def test_a_hanging_collective_blames_no_single_rank(states):
    beats(states, 1.0, {0: 7, 1: 7, 2: 7})
    beats(states, 2.0 + STUCK_S, {0: 7, 1: 7, 2: 7})
    fault = states.find_fault(2.0 + STUCK_S)
    assert fault.ranks == (0, 1, 2)
    assert fault.text.endswith("at a forward; all ranks are at this operation")


def test_a_finished_rank_may_disconnect(states):
    states.record_done(1)
    states.record_disconnect(1, "its connection closed", 5.0)
    beats(states, 5000.0, {0: 1, 2: 1})
    assert states.find_fault(5000.0) is None


def test_a_suspended_job_continues_and_a_rank_that_does_not_resume_is_missing():
    states = joined(AWAKE_S)
    assert states.find_fault(1.0) is None
    assert states.find_fault(9001.0) is None  # no heartbeat was received yet, so rank 0 waits
    beats(states, 9002.0, {0: 1, 1: 1})
    for now_s in range(9003, 9035):
        beats(states, now_s, {0: 1, 1: 1})
        assert states.find_fault(now_s) is None
    for now_s in range(9035, 9040):
        beats(states, now_s, {0: 1, 1: 1})
        fault = states.find_fault(now_s)
    assert fault.ranks == (2,)


def test_suspended_time_does_not_count_as_time_without_progress():
    states = joined(AWAKE_S)
    states.find_fault(0.0)
    beats(states, 9000.0, {0: 1, 1: 1, 2: 1})
    assert states.find_fault(9000.0) is None
    for now_s in range(9001, 9589):
        beats(states, now_s, {0: 1, 1: 1, 2: 1})
        assert states.find_fault(now_s) is None
    beats(states, 9591.0, {0: 1, 1: 1, 2: 1})
    assert states.find_fault(9591.0).stuck


def test_a_rank_that_does_not_reach_a_collective_is_missing(states):
    beats(states, 1.0, {0: 7, 1: 6, 2: 7})
    beats(states, 60.0, {0: 7, 1: 6, 2: 7})
    states.record_failure(0, "RuntimeError: another rank did not come within 60 s", True, 61.0)
    assert states.find_fault(61.0 + SETTLE_S) is None  # the last known positions are older than the failure
    beats(states, 64.0, {1: 6, 2: 7})
    fault = states.find_fault(64.0)
    assert (fault.ranks, fault.stuck) == ((1,), True)
    assert fault.text == (
        "rank 1 (process 101 on node-1) is missing: at a forward; "
        "rank 0 (process 100 on node-0) failed while it waited: RuntimeError: another rank did not come within 60 s"
    )


def test_a_secondary_failure_is_named_if_there_is_no_original_one(states):
    beats(states, 1.0, {0: 7, 1: 7, 2: 7})
    states.record_failure(0, "RuntimeError: NCCL error", True, 2.0)
    beats(states, 5.0, {1: 7, 2: 7})
    assert states.find_fault(5.0).text.startswith("rank 0 (process 100 on node-0) failed: RuntimeError: NCCL error")


def test_a_secondary_failure_waits_for_the_silence_of_a_lost_machine(states):
    beats(states, 1.0, {0: 7, 1: 7, 2: 7})
    states.record_failure(0, "RuntimeError: timed out", True, 20.0)
    beats(states, 40.0, {2: 7})
    assert states.find_fault(40.0) is None
    beats(states, 47.0, {2: 7})
    assert states.find_fault(47.0).ranks == (1,)
