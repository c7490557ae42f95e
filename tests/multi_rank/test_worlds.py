"""RL runs of the video demos: two ranks and rollout workers give the same result as one rank."""

from pathlib import Path

import pytest

from multi_rank.resuming import train_on_rank
from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, records
from wfm_ds.cli.quickstart import load_demo

RECIPES = Path(__file__).parent.parent.parent / "recipes"
# AdamW's first steps divide by the gradient's size. A larger eps limits the effect of rounding errors.
SHORT = [
    "run.steps=2",
    "optimizer.eps=1e-4",
    "logging.console=false",
    "logging.num_samples=2",
    "validation.every=0",
    "validation.at_start=false",
]
SMALL = {
    # With the demo's own reward, all samples of an untrained model have reward 0, so the gradient would be 0.
    "shapes": [
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "validation.seeds=[1000001]",
        "reward.functions=[{name: jpeg_compressibility}]",
    ],
    "actions": ["rollout.prompts_per_step=4", "rollout.group_size=4", "validation.num_prompts=4"],
    "long": ["rollout.prompts_per_step=4", "rollout.group_size=4", "validation.num_prompts=2", "validation.seeds=[1]"],
}
# A worker denoises one group of 4 at a time. The ranks use the same batch size.
ALIKE = ["engine.max_forward_batch=4"]
ASYNC = ["rollout.mode=async", "rollout.max_staleness=0"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.long
def test_a_demo_learns_the_same_on_one_rank_on_two_and_with_workers(
    name, one_rank, two_ranks, tiny_pipelines, tmp_path
):
    demo = load_demo(name)
    demo.write_data(tmp_path / "data")
    for where, ranks, changes in (("one", one_rank, []), ("two", two_ranks, []), ("async", one_rank, ASYNC)):
        overrides = [
            f"run.output_dir={tmp_path / where}",
            f"model.path={tiny_pipelines(demo.pipeline or demo.name)}",
            f"data.path={tmp_path / 'data' / demo.rl_data}",
            *demo.rl_overrides(tmp_path),
            *(*SHORT, *SMALL[name], *ALIKE, *changes),
        ]
        recipe = RECIPES / demo.name / f"{demo.rl_recipes[-1]}.yaml"
        (outcome, *_) = ranks.run(train_on_rank, recipe=str(recipe), overrides=overrides)
        assert (outcome["status"], outcome["step"]) == ("finished", 2)
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_bitwise_equal(tmp_path / "async", tmp_path / "one")
    steps = [line for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    assert all(step["optim/grad_norm"] > 0 for step in steps)
