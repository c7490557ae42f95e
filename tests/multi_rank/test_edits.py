"""Whole runs of editing models: one rank against two, workers and resumed runs, and the first ratio of FlowGRPO."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multi_rank.resuming import train_with_own_code
from multi_rank.same_runs import assert_bitwise_equal, assert_same_runs, records

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


@pytest.fixture
def train(train_tiny, edits):
    """Return a function that trains one of CASES into tmp_path/where."""

    def run(case, where, *overrides, data=edits, **options):
        name, family, of_case = CASES[case]
        options |= {"family": family, "data": data, "function": train_with_own_code, "folder": TESTS}
        return train_tiny(where, name, *COMMON, "data.max_bad_fraction=0.5", *of_case, *overrides, **options)

    return run


@pytest.mark.parametrize("case", ["nft", "flow_grpo"])
@pytest.mark.long
def test_rl_runs_are_the_same_on_one_rank_on_two_with_workers_and_resumed(case, train, tmp_path):
    for name, ranks, overrides in (("one", 1, []), ("two", 2, []), ("async", 1, ASYNC), ("async_two", 2, ASYNC)):
        train(case, name, *overrides, ranks=ranks)
    for stop in (1, None):
        train(case, "resumed", stop_at=stop)
    assert_bitwise_equal(tmp_path / "one", tmp_path / "async")
    assert_bitwise_equal(tmp_path / "resumed", tmp_path / "one")
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    assert_same_runs(tmp_path / "one", tmp_path / "async_two")
    steps = [line for line in records(tmp_path / "one") if "optim/grad_norm" in line]
    assert all(step["optim/grad_norm"] > 0 for step in steps)
    failed = [line[FAILED] for line in records(tmp_path / "one") if FAILED in line]
    assert failed == [0.0, 0.0]
    if case == "flow_grpo":
        assert steps[0]["policy/ratio_start_abs_dev"] == 0


def test_rl_does_not_decode_targets_that_it_does_not_use(train, edits, tmp_path):
    folder = shutil.copytree(edits, tmp_path / "edits")
    for i in range(2, 6):  # validation reads the first two samples
        (folder / f"file_name/{i}.png").write_bytes(b"no image")
    run = train("nft", "one", "data.target=true", data=folder)
    steps = [line for line in records(run) if "optim/grad_norm" in line]
    assert [step["data/bad/decode"] for step in steps] == [0, 0]


def test_sft_is_the_same_on_one_rank_and_two(train):
    one = train("sft", "one", "engine.gradient_accumulation=2")
    assert_same_runs(one, train("sft", "two", "engine.gradient_accumulation=1", ranks=2))
    assert any(line.get("val/loss", 0) > 0 for line in records(one))
