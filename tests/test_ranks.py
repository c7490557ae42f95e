"""Tests of the rank fixtures: results by rank, messages of errors and hangs, and the end of all processes."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from ranks import DEADLINE_S, PRELOADED, RankError, Ranks


def sum_over_ranks(start):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank(), "pid": os.getpid()}


def fail_on_rank_1():
    if dist.get_rank() == 1:
        raise KeyError("what rank 1 misses")
    return "fine"


def hang_on_rank_0():
    if dist.get_rank() == 0:
        threading.Event().wait()
    dist.barrier()


def test_tests_with_ranks_are_slow_unless_marked_unit(request, two_ranks):
    assert request.node.get_closest_marker("slow")


@pytest.mark.unit
def test_results_are_ordered_by_rank_and_processes_are_reused(request, two_ranks):
    assert not request.node.get_closest_marker("slow")
    for start in (1, 5):
        parts = two_ranks.run(sum_over_ranks, start=start)
        assert [part["rank"] for part in parts] == [0, 1]
        assert [int(part["total"]) for part in parts] == [2 * start + 1] * 2
    assert [part["pid"] for part in parts] == [process.pid for process in two_ranks._processes]


def find_preloaded():
    """Return the names in PRELOADED that are not imported, and the file of wfm_ds."""
    return {"missing": [name for name in PRELOADED if name not in sys.modules], "file": sys.modules["wfm_ds"].__file__}


@pytest.mark.unit
def test_ranks_start_with_the_heavy_packages_of_this_checkout(two_ranks, root):
    expected = {"missing": [], "file": str(root / "wfm_ds" / "__init__.py")}
    assert two_ranks.run(find_preloaded) == [expected, expected]


def change_process(folder):
    os.environ["OF_ANOTHER_TEST"] = os.environ["LOCAL_RANK"] = "7"
    os.chdir(folder)
    sys.path.insert(0, folder)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)


def describe_process():
    return {
        "environment": [os.environ.get("OF_ANOTHER_TEST"), int(os.environ["LOCAL_RANK"])],
        "folders": [os.getcwd(), sys.path[0]],
        "torch": [torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype()), float(torch.rand(1))],
    }


def test_a_call_does_not_affect_the_next_one(two_ranks, tmp_path):
    before = two_ranks.run(describe_process)
    two_ranks.run(change_process, folder=str(tmp_path))
    assert two_ranks.run(describe_process) == before
    assert [part["environment"] for part in before] == [[None, 0], [None, 1]]


def test_a_traceback_of_a_rank_is_raised_here(two_ranks):
    with pytest.raises(RankError, match=r"rank 1 of 2 raised in fail_on_rank_1") as caught:
        two_ranks.run(fail_on_rank_1)
    assert "KeyError: 'what rank 1 misses'" in str(caught.value)
    assert int(two_ranks.run(sum_over_ranks, start=0)[0]["total"]) == 1, "the group survives an error that all ended"


@pytest.mark.slow
def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path):
    ranks = Ranks(2, tmp_path, deadline_s=15)  # long enough to enter the function on a busy machine
    try:
        with pytest.raises(RankError, match=r"hang_on_rank_0 did not end within 15 s") as caught:
            ranks.run(hang_on_rank_0)
        assert str(caught.value).count("in hang_on_rank_0") == 2
        ranks.deadline_s = DEADLINE_S
        assert int(ranks.run(sum_over_ranks, start=0)[1]["total"]) == 1, "the next run starts a new group"
        processes = list(ranks._processes)
    finally:
        ranks.stop()
    assert not any(process.is_alive() for process in processes)
