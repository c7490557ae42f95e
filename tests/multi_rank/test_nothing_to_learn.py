"""RL steps with equal rewards: each is skipped with one log line, and the run ends with an error on all ranks."""

import json

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank
from ranks import attempt
from wfm_ds.errors import RunError

NOTHING = "no gradient: every sample failed or its group has identical rewards"


def train_for_nothing(recipe, overrides):
    return attempt(lambda: train_on_rank(recipe, overrides), RunError)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [("sd3_nft", "zero2"), ("sd3_nft", "zero1"), ("sd3_nft", "zero3"), ("sd3_flow_grpo", "zero3")],
)
@pytest.mark.ci_cases("sd3_nft-zero2", "sd3_flow_grpo-zero3")
def test_equal_rewards_skip_the_step_without_an_alarm(two_ranks, tiny_pipelines, tmp_path, recipe, engine):
    overrides = [
        f"engine.deepspeed={engine}",
        *("reward.functions=[{name: color, clip: [5, 6]}]", "algorithm.zero_std=drop"),
        *("validation.every=0", "validation.at_start=false", "validation.num_prompts=1", "validation.seeds=[1]"),
        *("logging.console=false", "engine.guard=true"),
    ]
    made = tiny_recipe(recipe, tmp_path / "run", tiny_pipelines("sd3"), *overrides)
    messages = two_ranks.run(train_for_nothing, **made)
    assert messages[0].startswith("nothing was trained and nothing is exported: no optimizer step was applied in 2 st")
    assert messages[1] == messages[0]
    for rank in (0, 1):
        said = (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert [line for line in said if "OVERFLOW" in line or "finite" in line] == []
        assert len([line for line in said if NOTHING in line]) == 2  # one line per step
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["optim/skipped_steps"] for line in lines if "optim/skipped_steps" in line]
    assert skipped == list(range(1, len(skipped) + 1))
    assert not (tmp_path / "run" / "safetensors").exists()
