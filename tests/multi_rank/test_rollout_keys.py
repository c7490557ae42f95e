"""Whole runs with cheaper rollouts (CUDA graphs, merged LoRA, joint guidance) equal runs without these options."""

import pytest

from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, exported

pytestmark = pytest.mark.slow

COMMON = ["run.steps=2", "logging.console=false", "validation.at_start=false", "optimizer.eps=1e-4"]
GRAPH, MERGED, JOINT = "rollout.cuda_graph=true", "rollout.merge_lora=true", "sampling.guidance_batch=joint"
OLD = "algorithm.old_decay={initial: 0.6, slope: 0, max: 0.6}"  # makes the old policy differ from the trained policy
GUIDED = ["sampling.guidance_scale=2", "engine.max_forward_batch=6"]  # batches of 6 and 2; only the 2 can be joint


@pytest.fixture
def train(train_tiny):
    return lambda where, name, *overrides, **options: train_tiny(where, name, *COMMON, *overrides, **options)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sd3_nft", [OLD, *GUIDED]),
        ("sd3_nft", [OLD, *GUIDED, MERGED, JOINT]),
        ("sd3_nft", ["lora=null", "optimizer.lr=1e-3", OLD]),
        ("sd3_flow_grpo", ["engine.max_forward_batch=6"]),
    ],
    ids=["lora", "merged", "full", "grpo"],
)
@pytest.mark.ci_cases("lora")
def test_replayed_rollouts_equal_plain_rollouts_bit_for_bit(name, overrides, train):
    """The weights change between the steps. Graphs recorded in the first step must use the new weights."""
    plain, replayed = train("plain", name, *overrides), train("replayed", name, *overrides, GRAPH)
    assert_bitwise_equal(replayed, plain)
    assert exported(replayed).keys() == exported(plain).keys()


def test_merged_and_joint_rollouts_equal_plain_rollouts_up_to_rounding(train):
    plain = train("plain", "sd3_nft", OLD, *GUIDED)
    assert_same_runs(plain, train("cheaper", "sd3_nft", OLD, *GUIDED, MERGED, JOINT, ranks=1))


@pytest.mark.long
def test_each_of_two_experts_is_merged_and_replayed(train):
    video = ["sampling.num_frames=5", "reward.functions=[{name: motion}]", OLD]
    plain = train("plain", "sd3_nft", *video, family="wan22")
    assert_same_runs(plain, train("cheaper", "sd3_nft", *video, MERGED, GRAPH, family="wan22"))


def test_workers_merge_and_replay_published_weights(train):
    cheaper = [OLD, *GUIDED, MERGED, JOINT, GRAPH]
    plain = train("plain", "sd3_nft", OLD, *GUIDED)
    workers = train("async", "sd3_nft", *cheaper, "rollout.mode=async", "rollout.max_staleness=0")
    assert_same_runs(plain, workers)
