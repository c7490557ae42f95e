"""Whole DDRL runs on videos with conditioning frames, and the tiny variants of the Cosmos recipes."""

import json

import numpy as np
import pytest

from clips import write_clip
from multi_rank.resuming import tiny_recipe, train_on_rank
from multi_rank.same_runs import assert_same_runs, records
from multi_rank.test_runs import COMMON

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Six captioned clips of slowly brightening blocks. The third file is corrupt."""
    folder, draw = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    for i in range(6):
        blocks = draw.integers(0, 200, (4, 4, 3))
        frames = [np.kron(blocks + 4 * t, np.ones((8, 8, 1))).astype(np.uint8) for t in range(12)]
        write_clip(folder / f"{i}.mp4", pictures=frames, size=(32, 32), fps=16)
        (folder / f"{i}.json").write_text(json.dumps({"prompt": f"clip number {i}"}))
    (folder / "2.mp4").write_bytes(b"nothing")
    return folder


@pytest.mark.long
def test_videos_with_given_frames_train_alike_on_one_rank_and_on_two(train_tiny, videos, tmp_path):
    overrides = [
        "data.max_bad_fraction=0.5",
        *(f"sampling.{size}" for size in ("height=32", "width=32", "num_frames=9")),
        *("algorithm.max_num_conditional_frames=2", "algorithm.kl_beta=0.1", "algorithm.data_beta=0.5"),
        "engine.micro_batch_size=2",
        *(f"rollout.{key}" for key in ("prompts_per_step=3", "group_size=2", "policy=reference")),
        *("reward.functions=[{name: motion}]", "validation.num_prompts=1"),
        *COMMON,
    ]
    for name, ranks in (("one", 1), ("two", 2)):
        train_tiny(name, "cosmos25_ddrl", *overrides, ranks=ranks, family="cosmos25", data=videos)
    steps = [r for r in records(tmp_path / "one") if "loss/total" in r]
    assert steps[0]["policy/ratio_max_abs_dev"] < 1e-4 < steps[2]["policy/ratio_max_abs_dev"]
    assert steps[2]["data/bad/decode"] >= 1
    assert_same_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("name", ["cosmos25_ddrl", "cosmos25_mock", "cosmos25_flow_grpo"])
@pytest.mark.long
def test_the_tiny_variants_of_the_cosmos_recipes_run(name, one_rank, tiny_pipelines, digits, tmp_path):
    data = {"data": digits} if name == "cosmos25_ddrl" else {}
    model = tiny_pipelines("cosmos25")
    (outcome,) = one_rank.run(
        train_on_rank, **tiny_recipe(name, tmp_path / "out", model, "validation.at_start=false", **data)
    )
    assert (outcome["status"], outcome["step"]) == ("finished", 2)
    assert records(tmp_path / "out")[0]["optim/grad_norm"] > 0
