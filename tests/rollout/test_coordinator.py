"""The coordinator alone: hypothesis simulates workers that are slow, send duplicates, fail, or report arbitrary
weights."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.rollout.remote.coordinator import Coordinator


def a_coordinator(**changes):
    sizes = {"groups_per_step": 2, "group_size": 5, "chunk_size": 2, "max_staleness": 1}
    return Coordinator(**({"session_id": "life", "first_step": 1, "last_step": 9} | sizes | changes))


def members(chunk):
    return [(chunk.step, chunk.group, k) for k in range(chunk.first, chunk.stop)]


@settings(max_examples=200, deadline=None)
@given(
    st.data(),
    st.integers(0, 3),  # max_staleness
    st.integers(1, 3),  # groups
    st.integers(2, 5),  # members
    st.integers(1, 4),  # chunk
    st.integers(1, 4),  # first step
)
@pytest.mark.slow
def test_every_sample_is_trained_once_and_within_the_staleness_bound(data, bound, groups, size, chunk, first_step):
    last_step = first_step + 4
    sizes = {"groups_per_step": groups, "group_size": size, "chunk_size": chunk}
    c = a_coordinator(max_staleness=bound, first_step=first_step, last_step=last_step, **sizes)
    live, over, trained, step, dropped = {}, [], [], first_step, 0

    def admit():
        for admitted, task_id in c.admit_chunks():
            assert task_id not in live
            assert task_id not in over
            live[task_id] = admitted

    c.record_publication(first_step - 1)
    admit()
    while step <= last_step:
        assert len({ch.step for ch in live.values()}) <= bound + 1, "work under way is bounded"
        task_id = data.draw(st.sampled_from([*sorted(live), *over[-3:]]))
        claim = data.draw(st.integers(first_step - 2, last_step + 1))
        if task_id not in live:  # a duplicate must not change anything
            assert c.record_result(task_id, claim) is None
            c.abandon_chunk(task_id, "late")
            continue
        admitted = live.pop(task_id)
        over.append(task_id)
        if data.draw(st.integers(0, 9)) == 0:
            c.abandon_chunk(task_id, "broken")
        else:
            good = max(admitted.step - 1 - bound, first_step - 1) <= claim <= c.last_publication
            again = c.record_result(task_id, claim)
            assert (again is None) == good
            if again is not None:
                dropped += admitted.stop - admitted.first
                live[again] = admitted
                if data.draw(st.booleans()):  # otherwise it may stay in progress forever
                    live.pop(again)
                    over.append(again)
                    assert c.record_result(again, c.last_publication) is None
        while step <= last_step and c.is_complete(step):
            plan = c.pop_step(step)
            assert [m for closed in plan for m in members(closed.chunk)] == [
                (step, g, k) for g in range(groups) for k in range(size)
            ]
            assert all(
                closed.reason or (closed.publication is not None and 0 <= step - 1 - closed.publication <= bound)
                for closed in plan
            )
            trained.append(step)
            c.record_publication(step)
            step += 1
            admit()
    assert trained == list(range(first_step, last_step + 1))
    assert live == {}
    assert c.num_dropped_stale == dropped


@check_each(
    "bound, first_step, last_step, admitted",  # admitted steps after each publication
    [(0, 1, 9, [{1}, {2}]), (2, 1, 9, [{1, 2, 3}, {4}]), (5, 3, 4, [{3, 4}, set()])],
)
def test_steps_are_admitted_up_to_the_bound_and_the_last_one(bound, first_step, last_step, admitted):
    c = a_coordinator(max_staleness=bound, first_step=first_step, last_step=last_step)
    assert bound or c.admit_chunks() == []
    for publication, steps in enumerate(admitted, first_step - 1):
        c.record_publication(publication)
        chunks = [chunk for chunk, _ in c.admit_chunks()]
        assert {chunk.step for chunk in chunks} == steps
        # chunks like batches; no chunk contains two groups
        cuts = [(g, a, b) for g in (0, 1) for a, b in ((0, 2), (2, 4), (4, 5))]
        assert [chunk[1:] for chunk in chunks] == cuts * len(steps)
        assert c.admit_chunks() == []


def test_results_of_an_earlier_trainer_process_are_ignored():
    c = a_coordinator(max_staleness=0)
    c.record_publication(0)
    (chunk, task_id), *_ = c.admit_chunks()
    assert c.record_result(task_id.replace("life", "past"), 0) is None
    assert c.num_waiting(1) == 6
    assert c.find_chunk(task_id) == chunk


def test_a_step_is_planned_once_and_only_if_complete():
    c = a_coordinator(max_staleness=0)
    c.record_publication(0)
    tasks = c.admit_chunks()
    for _, task_id in tasks[1:]:
        c.record_result(task_id, 0)
    with pytest.raises(ValueError, match="not complete"):
        c.pop_step(1)
    c.abandon_chunk(tasks[0][1], "three workers died")
    assert c.pop_step(1)[0].reason == "three workers died"
    with pytest.raises(ValueError, match="not complete"):
        c.pop_step(1)
    with pytest.raises(ValueError, match="expected publication 1, got 3"):
        c.record_publication(3)
