"""An RL step whose samples all have the same reward: no alarm, one sentence, and nothing moves on any rank."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from multi_rank.resuming import train_on_rank

ROOT = Path(__file__).parent.parent.parent
NOTHING = "no gradient: every sample failed or its group has identical rewards"


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [
        ("sd3_nft", "zero2"),
        pytest.param("sd3_nft", "zero1", marks=pytest.mark.slow),
        pytest.param("sd3_nft", "zero3", marks=pytest.mark.slow),
        pytest.param("sd3_flow_grpo", "zero3", marks=pytest.mark.slow),
    ],
)
def test_equal_rewards_skip_the_step_without_an_alarm(two_ranks, tiny_pipelines, tmp_path, recipe, engine):
    overrides = [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}",
        f"engine.deepspeed={engine}",
        *("reward.functions=[{name: color, clip: [5, 6]}]", "algorithm.zero_std=drop"),
        *("validation.every=0", "validation.at_start=false", "validation.num_prompts=1", "validation.seeds=[1]"),
        *("logging.console=false", "engine.guard=true"),
    ]
    path = ROOT / "tests" / "recipes" / f"{recipe}.yaml"
    outcomes = two_ranks.run(train_on_rank, recipe=str(path), overrides=overrides)
    assert [(outcome["status"], outcome["step"]) for outcome in outcomes] == [("finished", 2)] * 2
    for rank in (0, 1):
        said = (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert [line for line in said if "OVERFLOW" in line or "finite" in line] == []
        assert len([line for line in said if NOTHING in line]) == 2  # once a step
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["optim/skipped_steps"] for line in lines if "optim/skipped_steps" in line]
    assert skipped == list(range(1, len(skipped) + 1))
    (adapter,) = (tmp_path / "run" / "safetensors").rglob("lora/*.safetensors")
    assert not any(tensor.any() for name, tensor in load_file(adapter).items() if "lora_B" in name)
