"""The bytes that two ranks exchange in a real training step equal the formulas of the scaling model."""

import dataclasses

import pytest
import torch

from benchmarks.small_runs import CASES, CONTROL_BYTES, count_on_rank, formula_bytes, write_config
from benchmarks.traffic import TrafficCounter

QUICK = {"zero1 LoRA bfloat16", "zero3 full float32", "zero2 full float32 sp=2"}


def marked(case):
    return pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_bytes_of_a_step_equal_the_formulas(case, two_ranks, tmp_path):
    config = write_config(tmp_path, case.stage)
    for rank in two_ranks.run(count_on_rank, config=str(config), **dataclasses.asdict(case)):
        sent = {kind: num_bytes for kind, (_, num_bytes) in rank["traffic"].items()}
        calls, num_bytes = rank["traffic"].get("control", (0, 0))
        assert num_bytes <= calls * CONTROL_BYTES
        assert calls <= 4
        sent.pop("control", None)
        formulas = formula_bytes(case, 2, rank)
        if case.stage == 3 and case.lora:
            forward = 2 * 4 * (sum(rank["trained"]) + sum(rank["frozen"]))
            assert forward < sent.pop("all-gather") <= formulas.pop("all-gather")
        assert sent == formulas


def count_by_hand():
    import torch.distributed as dist

    with TrafficCounter(control_bytes=4) as counted:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.empty(10, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.all_to_all_single(torch.empty(6), torch.ones(6))
        dist.broadcast(torch.ones(1), 0)
        dist.barrier()
    return counted.traffic()


def test_each_kind_is_counted_by_its_larger_side(two_ranks):
    want = {
        "all-gather": (1, 80),
        "all-reduce": (1, 12),
        "all-to-all": (1, 24),
        "control": (1, 4),
        "reduce-scatter": (1, 16),
    }
    assert two_ranks.run(count_by_hand) == [want, want]
