"""Runs that choose prompts by reward std: equal on any number of ranks, with workers, and after a resume."""

import pytest

from multi_rank.resuming import assert_equal_runs
from multi_rank.same_runs import assert_same_runs, records

SPREAD = ["data.choose=reward_std", "rollout.prompts_per_step=4", "rollout.group_size=2", "validation.every=0"]
SPREAD += ["validation.at_start=false", "validation.num_prompts=1", "logging.console=false"]
LEARNING = ["run.steps=4", "optimizer.eps=1e-4", "optimizer.lr=3e-2"]
# The weights do not change at this learning rate. A sample is the same for every policy version: runs are comparable.
STALE = ["run.steps=6", "optimizer.lr=1e-30", "rollout.mode=async", "rollout.max_staleness=2", "rollout.in_flight=3"]


@pytest.fixture
def train(train_tiny):
    """Return a function that trains tiny NFT into tmp_path/where."""
    return lambda where, *overrides, **options: train_tiny(where, "sd3_nft", *SPREAD, *overrides, **options)


@pytest.mark.long
def test_a_run_with_reward_driven_prompts_does_not_depend_on_ranks_workers_or_resumes(train, tmp_path):
    train("whole", *LEARNING, ranks=2)
    train("parts", *LEARNING, ranks=2, stop_at=2)
    train("parts", *LEARNING, ranks=2)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    train("async", *LEARNING, "rollout.mode=async", "rollout.max_staleness=0")
    assert_same_runs(tmp_path / "whole", tmp_path / "async")
    steps = [step for step in records(tmp_path / "whole") if "loss/total" in step]
    assert steps[0]["data/prompts_seen"] == 4
    assert all(step["data/prompts_effective"] < 11.9 for step in steps)  # out of 12 prompts
    train("shuffled", *LEARNING, "run.steps=1", "reward.shuffle=true", ranks=2)
    (shuffled,) = [step for step in records(tmp_path / "shuffled") if "loss/total" in step]
    assert shuffled["reward/total/mean"] == pytest.approx(steps[0]["reward/total/mean"])
    # The prompt table gets the same rewards as the algorithm: the shuffled ones.
    assert abs(shuffled["data/prompt_reward_std_mean"] - steps[0]["data/prompt_reward_std_mean"]) > 1e-3


@pytest.mark.long
def test_prompts_drawn_ahead_are_equal_on_each_rank_and_after_a_resume(train, tmp_path):
    train("whole", *STALE, ranks=2)
    train("parts", *STALE, "run.steps=3", "checkpoint.every=3", ranks=2)
    train("parts", *STALE, "checkpoint.every=3", ranks=2)
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    steps = [step for step in records(tmp_path / "whole") if "loss/total" in step]
    assert len({step["reward/total/mean"] for step in steps}) == 6
    assert steps[-1]["data/prompts_effective"] < 11.9
