"""Transformers shared by ranks against the same in one process: outputs, and gradients summed over the ranks."""

import pytest
import torch.distributed as dist

from distributed.sharing import CASES, errors
from wfm_ds.errors import UserError
from wfm_ds.ulysses.groups import sequence_group

FORWARD, GRADIENT = 1e-5, 2e-5
VARIANTS = {
    "full": {},
    "full, checkpointed": {"checkpointing": True},
    "lora": {"lora": True},
    "lora, checkpointed": {"lora": True, "checkpointing": True},
}


def variants_on_rank(name):
    case = CASES[name]
    found = {variant: errors(name, case.sizes, **options) for variant, options in VARIANTS.items()}
    return {**found, "even": errors(name, [case.even], heads=6)}


def require_equal(found):
    for variant, error in found.items():
        assert error["forward"] <= FORWARD, (variant, error)
        assert error["gradient"] <= GRADIENT, (variant, error)
        assert error["compared"] > 10


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name, two_ranks):
    for found in two_ranks.run(variants_on_rank, name=name):
        require_equal(found)


def groups_on_rank():
    return {"size": dist.get_world_size(sequence_group(2)), "alone": dist.get_world_size(sequence_group(1))}


def refused_group_on_rank():
    with pytest.raises(UserError, match=r"engine\.sequence_parallel = 3 does not divide the 2 ranks; use one of 1, 2"):
        sequence_group(3)


def test_groups_are_neighbours_and_come_out_even(two_ranks):
    assert two_ranks.run(groups_on_rank) == [{"size": 2, "alone": 1}] * 2
    two_ranks.run(refused_group_on_rank)
