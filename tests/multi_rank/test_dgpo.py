"""DGPO weights loss terms by sums over whole groups. Whole runs on two ranks equal runs on one rank."""

import pytest

from forward_counts import counted, predicted
from multi_rank.same_runs import assert_same_runs, records

COMMON = [
    "run.steps=3",
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-2",
    "algorithm.beta=1000",
    "rollout.prompts_per_step=3",  # the second group is split across both ranks
    "engine.micro_batch_size=3",  # no micro-batch has a whole group
    "validation.at_start=false",
    "validation.every=0",
    "logging.console=false",
    "engine.guard=true",
]
KINDS = {
    "lora zero2": ["engine.deepspeed=zero2"],
    "lora zero3, grid": ["engine.deepspeed=zero3", "algorithm.levels=grid", "sampling.guidance_scale=2"],
    "full zero3": ["lora=null", "engine.deepspeed=zero3"],
    "full zero2": ["lora=null", "engine.deepspeed=zero2"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ci_cases("full zero3")
def test_dgpo_on_two_ranks_equals_dgpo_on_one(kind, train_tiny):
    one, two = (train_tiny(f"{n} ranks", "sd3_dgpo", *COMMON, *KINDS[kind], ranks=n) for n in (1, 2))
    for num_ranks, folder in ((1, one), (2, two)):
        assert "guidance" in str(KINDS[kind]) or counted(folder) == predicted(folder, num_ranks)
    trained = [line for line in records(one) if "loss/total" in line]
    # In the first step the policy equals the reference. Rounding differs because reference batches are larger.
    assert trained[0]["dgpo/group_weight"] == pytest.approx(0.5, abs=1e-5)
    assert abs(trained[-1]["dgpo/group_weight"] - 0.5) > 1e-3
    assert trained[-1]["kl/ref"] > 1e-5
    assert_same_runs(one, two)
