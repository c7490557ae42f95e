"""Whole runs of editing models: one rank against two, workers and resumed runs, and the first ratio of FlowGRPO."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multi_rank.resuming import tiny_recipe, train_with_own_code
from multi_rank.same_runs import assert_same_runs, exported, records

TESTS = str(Path(__file__).parent.parent)
SIZE = 64
COMMON = [
    "data.kind=folder",
    "data.inputs=[source]",
    f"sampling.height={SIZE}",
    f"sampling.width={SIZE}",
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-2",
    "run.steps=2",
    "engine.guard=true",
    "logging.console=false",
]
RL = [
    "data.target=false",
    "data.reward_inputs=[mask]",
    "sampling.guidance_scale=2",
    "reward.functions=[{name: preservation, options: {full_at: 60}}, {name: color, weight: 0.2}]",
    "validation.num_prompts=2",
    "validation.seeds=[1000001]",
]
CASES = {
    "nft": ("sd3_nft", "flux2", RL),
    "flow_grpo": ("sd3_flow_grpo", "qwen_image_edit_plus", [*RL, "data.inputs=[source, source_2]"]),
    "sft": ("sd3_sft", "qwen_image_edit_plus", ["data.caption_dropout=0.3", "validation.num_images=2"]),
}
FAILED = "reward/preservation/failed"
ASYNC = ["rollout.mode=async", "rollout.max_staleness=0"]


@pytest.fixture(scope="module")
def edits(tmp_path_factory):
    """A table of six edits with two sources and a mask. One source is missing."""
    folder, draws = tmp_path_factory.mktemp("edits"), np.random.default_rng(0)
    lines = []
    for i in range(6):
        names = {name: f"{name}/{i}.png" for name in ("file_name", "source", "source_2", "mask")}
        for name, path in names.items():
            pixels = draws.integers(0, 256, (8, 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
            if name == "mask":
                pixels[:] = 255 * (np.arange(SIZE) < SIZE // 2)[:, None]
            (folder / path).parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / path)
        lines.append(json.dumps({**names, "text": f"make the {['red', 'blue'][i % 2]} square {i} green"}))
    (folder / "source/3.png").unlink()
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def settings(case, folder, tiny_pipelines, edits, *overrides):
    name, family, of_case = CASES[case]
    overrides = [*COMMON, "data.max_bad_fraction=0.5", *of_case, *overrides]
    return {**tiny_recipe(name, folder, tiny_pipelines(family), *overrides, data=edits), "folder": TESTS}


def assert_equal_runs(one, two):
    assert records(one) == records(two)
    ours, theirs = exported(one), exported(two)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("case", ["nft", "flow_grpo"])
@pytest.mark.long
def test_rl_runs_are_the_same_on_one_rank_on_two_with_workers_and_resumed(
    case, one_rank, two_ranks, tiny_pipelines, edits, tmp_path
):
    for name, ranks, overrides in (
        ("one", one_rank, []),
        ("two", two_ranks, []),
        ("async", one_rank, ASYNC),
        ("async_two", two_ranks, ASYNC),
    ):
        ranks.run(train_with_own_code, **settings(case, tmp_path / name, tiny_pipelines, edits, *overrides))
    for stop in (1, None):
        resumed = settings(case, tmp_path / "resumed", tiny_pipelines, edits)
        one_rank.run(train_with_own_code, **resumed, stop_at=stop)
    assert_equal_runs(tmp_path / "one", tmp_path / "async")
    assert_equal_runs(tmp_path / "resumed", tmp_path / "one")
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_same_runs(tmp_path / "one", tmp_path / "async_two")
    steps = [line for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    assert all(step["optim/grad_norm"] > 0 for step in steps)
    failed = [line[FAILED] for line in records(tmp_path / "one") if FAILED in line]
    assert failed == [0.0, 0.0]
    if case == "flow_grpo":
        assert steps[0]["policy/ratio_start_abs_dev"] == 0


def test_rl_does_not_decode_targets_that_it_does_not_use(one_rank, tiny_pipelines, edits, tmp_path):
    folder = shutil.copytree(edits, tmp_path / "edits")
    for i in range(2, 6):  # validation reads the first two samples
        (folder / f"file_name/{i}.png").write_bytes(b"no image")
    made = settings("nft", tmp_path / "one", tiny_pipelines, folder, "data.target=true")
    one_rank.run(train_with_own_code, **made)
    steps = [line for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    assert [step["data/bad/decode"] for step in steps] == [0, 0]


def test_sft_is_the_same_on_one_rank_and_two(one_rank, two_ranks, tiny_pipelines, edits, tmp_path):
    for name, ranks, batches in (("one", one_rank, 2), ("two", two_ranks, 1)):
        accumulation = f"engine.gradient_accumulation={batches}"
        ranks.run(train_with_own_code, **settings("sft", tmp_path / name, tiny_pipelines, edits, accumulation))
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert any(line.get("val/loss", 0) > 0 for line in records(tmp_path / "one"))
