"""Runs that choose prompts by reward std: equal on any number of ranks, with workers, and after a resume."""

import pytest

from multi_rank.resuming import assert_equal_runs, tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records

SPREAD = ["data.choose=reward_std", "rollout.prompts_per_step=4", "rollout.group_size=2", "validation.every=0"]
SPREAD += ["validation.at_start=false", "validation.num_prompts=1", "logging.console=false"]
LEARNING = ["run.steps=4", "optimizer.eps=1e-4", "optimizer.lr=3e-2"]
# The weights do not change at this learning rate. A sample is the same for every policy version: runs are comparable.
STALE = ["run.steps=6", "optimizer.lr=1e-30", "rollout.mode=async", "rollout.max_staleness=2", "rollout.in_flight=3"]


@pytest.fixture
def train(tiny_pipelines, tmp_path):
    """Return a function that trains tiny NFT on the given ranks into tmp_path/where."""

    def run(ranks, where, *overrides, **stop):
        recipe = tiny_recipe("sd3_nft", tmp_path / where, tiny_pipelines("sd3"), *SPREAD, *overrides)
        return ranks.run(train_on_rank, **recipe, **stop)

    return run


@pytest.mark.long
def test_a_run_with_reward_driven_prompts_does_not_depend_on_ranks_workers_or_resumes(
    train, one_rank, two_ranks, tmp_path
):
    train(two_ranks, "whole", *LEARNING)
    train(two_ranks, "parts", *LEARNING, stop_at=2)
    train(two_ranks, "parts", *LEARNING)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    train(one_rank, "async", *LEARNING, "rollout.mode=async", "rollout.max_staleness=0")
    assert_same_runs(tmp_path / "whole", tmp_path / "async")
    steps = [step for step in records(tmp_path / "whole") if "loss/total" in step]
    assert steps[0]["data/prompts_seen"] == 4
    assert all(step["data/prompts_effective"] < 11.9 for step in steps)  # out of 12 prompts
    train(two_ranks, "shuffled", *LEARNING, "run.steps=1", "reward.shuffle=true")
    (shuffled,) = [step for step in records(tmp_path / "shuffled") if "loss/total" in step]
    assert shuffled["reward/total/mean"] == pytest.approx(steps[0]["reward/total/mean"])
    # The prompt table gets the same rewards as the algorithm: the shuffled ones.
    assert abs(shuffled["data/prompt_reward_std_mean"] - steps[0]["data/prompt_reward_std_mean"]) > 1e-3


@pytest.mark.long
def test_prompts_drawn_ahead_are_equal_on_each_rank_and_after_a_resume(train, two_ranks, tmp_path):
    train(two_ranks, "whole", *STALE)
    train(two_ranks, "parts", *STALE, "run.steps=3", "checkpoint.every=3")
    train(two_ranks, "parts", *STALE, "checkpoint.every=3")
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    steps = [step for step in records(tmp_path / "whole") if "loss/total" in step]
    assert len({step["reward/total/mean"] for step in steps}) == 6
    assert steps[-1]["data/prompts_effective"] < 11.9
