"""Whole runs of offline DPO: two ranks against one, the initial policy against the reference, cached latents."""

import json
import math
from pathlib import Path

import pytest

from forward_counts import counted, predicted
from multi_rank.same_runs import assert_same_runs, records
from wfm_ds.demos.digits_data import write_digits

CUTS = {"one": "engine.micro_batch_size=4", "two": "engine.micro_batch_size=2"}  # 8 pairs per optimizer step
COMMON = [
    "data.max_bad_fraction=0.2",
    "run.steps=3",
    "optimizer.eps=1e-4",
    "optimizer.lr=3e-3",
    "algorithm.beta=50",  # the loss multiplies rounding errors by beta
    "algorithm.stratified=true",
    "validation.every=2",
    "validation.holdout=0.2",
    "validation.num_images=3",
    "sampling.eval_steps=1",
    "logging.console=false",
]
LORA, FULL = "lora={rank: 4, alpha: 8}", "lora=null"
KINDS = {
    "lora zero2": [LORA, "engine.deepspeed=zero2", "engine.guard=true", "engine.max_forward_batch=5"],
    "full zero3": [FULL, "engine.deepspeed=zero3", "ema=null"],
    "lora zero3": [LORA, "engine.deepspeed=zero3"],
    "full zero2": [FULL, "engine.deepspeed=zero2"],
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Pairs of digit images. Two of the images are corrupt."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    lines = (folder / "pairs.jsonl").read_text().splitlines(keepends=True)[:40]
    (folder / "pairs.jsonl").write_text("".join(lines))
    for name in ("0009", "0017"):
        (folder / "images" / f"{name}.png").write_bytes(b"not a picture")
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ci_cases("lora zero2", "full zero3")
def test_dpo_on_two_ranks_equals_dpo_on_one(kind, train_tiny, digits, tmp_path):
    for ranks, where in enumerate(("one", "two"), 1):
        words = [*COMMON, CUTS[where], *KINDS[kind]]
        folder = train_tiny(where, "sd3_dpo", *words, ranks=ranks, data=digits / "pairs.jsonl")
        assert counted(folder) == predicted(folder, ranks, num_images=3)
    lines = records(tmp_path / "one")
    evaluated = [line for line in lines if "val/loss" in line]
    trained = [line for line in lines if "dpo/loss" in line]
    first, last = trained[0], trained[-1]
    # Before the first update the policy equals the reference bit for bit, so the margin is exactly 0.
    assert [first["dpo/loss"], evaluated[0]["val/loss"]] == pytest.approx([math.log(2)] * 2, rel=1e-6)
    assert (first["dpo/margin"], first["dpo/accuracy"], evaluated[0]["val/accuracy"]) == (0, 0.5, 0.5)
    assert abs(last["dpo/margin"]) > 1e-3
    assert last["dpo/margin"] == pytest.approx(last["dpo/chosen_reward"] - last["dpo/rejected_reward"], rel=1e-4)
    assert {line["step"] for line in evaluated} == {0, 2, 3}
    assert_same_runs(tmp_path / "one", tmp_path / "two")


def test_cached_latents_do_not_change_training(train_tiny, digits, tmp_path):
    words = ["sd3_dpo", *COMMON, "data.clip=centre", "run.steps=2", LORA]
    cache = [f"data.cache_dir={tmp_path / 'cache'}", "data.cache_latents=true"]
    train_tiny("kept", *words, *cache, data=digits / "pairs.jsonl", function=prepare_on_rank)
    entries = sorted((tmp_path / "cache" / "latents").rglob("*.safetensors"))
    images = {name for line in lines_of(digits) for name in (line["chosen"], line["rejected"])}
    assert len(entries) == len(images) - 2  # without the two corrupt images
    train_tiny("plain", *words, data=digits / "pairs.jsonl")
    train_tiny("kept", *words, *cache, data=digits / "pairs.jsonl")
    first, *_, last = (line for line in records(tmp_path / "plain") if "dpo/loss" in line)
    assert (first["dpo/margin"], first["dpo/accuracy"]) == (0, 0.5)  # the policy equals the reference bit for bit
    assert last["dpo/margin"] != 0
    assert_same_runs(tmp_path / "plain", tmp_path / "kept")
    assert sorted((tmp_path / "cache" / "latents").rglob("*.safetensors")) == entries


def lines_of(digits):
    return [json.loads(line) for line in (digits / "pairs.jsonl").read_text().splitlines()]


def prepare_on_rank(recipe, overrides):
    """Fill the recipe's caches like `wfm_ds.data.prepare`."""
    from wfm_ds.data.prepare import fill_caches
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file

    return fill_caches(recipe_file.load_recipe(Path(recipe), overrides), World.join())
