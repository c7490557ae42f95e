"""Runs on data of mixed shapes: two ranks with different sizes at a time get the same result as one rank, also after
a resume."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from clips import write_clip
from multi_rank.same_runs import assert_same_runs, records
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.datasets import load_data
from wfm_ds.data.order import BucketOrder
from wfm_ds.data.pixels import Framing
from wfm_ds.recipe import file as recipe_file

COMMON = [
    *("optimizer.eps=1e-4", "optimizer.lr=3e-2", "run.steps=3", "engine.guard=true", "logging.console=false"),
    *("data.buckets=[[16, 16], [16, 32], [24, 16]]", "data.max_bad_fraction=0.4", "data.crop=random"),
]
SIZES = [(20, 20), (30, 50), (36, 20)]  # of the image files


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """22 captioned images in three shapes. Two of them are truncated after the header."""
    folder = tmp_path_factory.mktemp("mixed")
    for i in range(22):
        pixels = np.random.default_rng(i).integers(0, 256, (*SIZES[i % 3], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.json").write_text(json.dumps({"prompt": f"noise number {i % 4}"}))
    for i in (3, 10):
        path = folder / f"{i:02}.png"
        path.write_bytes(path.read_bytes()[:300])
    return folder


@pytest.fixture
def train(train_tiny):
    return lambda where, name, *overrides, **options: train_tiny(where, name, *COMMON, *overrides, **options)


def units(samples, unit, count):
    """Return the buckets of the first units of a run. All samples of a unit have the same size."""
    buckets = Buckets(Framing(height=1, width=1), [(16, 16), (16, 32), (24, 16)])
    order = BucketOrder([buckets.choose_bucket(s.media) for s in samples], unit=unit, seed=0, shuffle=True)
    return [order.locate(unit * k).bucket for k in range(count)]


def sizes_logged(folder):
    text = (folder / "logs" / "rank_0.log").read_text()
    return text.split("samples by size: ")[1].splitlines()[0]


def test_sft_of_mixed_shapes_does_not_depend_on_ranks_or_resumes(train, images, tmp_path):
    sft = ["sd3_sft", "engine.micro_batch_size=3", "engine.deepspeed=zero3"]
    sft += ["validation.holdout=0.25", "validation.every=2", "sampling.eval_steps=1", "engine.max_forward_batch=5"]
    train("one", *sft, "engine.gradient_accumulation=4", data=images)
    for stop in (1, None):
        train("two", *sft, "engine.gradient_accumulation=2", data=images, ranks=2, stop_at=stop)
    steps = [record for record in records(tmp_path / "two") if "sft/loss" in record]
    assert steps[-1]["data/bad/decode"] > 0
    assert_same_runs(tmp_path / "one", tmp_path / "two")
    held_out = load_data(recipe_file.load_recipe(tmp_path / "one" / "recipe.yaml")).held_out
    of_unit = units([s for s in CaptionedFolder(images, max_bad_fraction=0).samples if s not in held_out], 3, count=12)
    # Each rank has two micro-batches per step. Units k and k + 2 run at the same time; some of them differ in size.
    assert any(of_unit[k] != of_unit[k + 2] for step in range(3) for k in (4 * step, 4 * step + 1))
    for name in ("one", "two"):
        assert re.fullmatch(r"16 x 16: \d+, 16 x 32: \d+, 24 x 16: \d+", sizes_logged(tmp_path / name))


def test_the_ranks_of_a_replica_see_one_size(train, images, tmp_path):
    sft = ["sd3_sft", "engine.micro_batch_size=3", "engine.gradient_accumulation=2"]
    sft += ["validation.holdout=0.25", "sampling.eval_steps=1"]
    train("one", *sft, data=images)
    train("two", *sft, "engine.sequence_parallel=2", data=images, ranks=2)
    assert_same_runs(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
def test_each_step_of_ddrl_has_one_size_on_all_ranks(train, images, tmp_path):
    ddrl = ["sd3_ddrl", "engine.micro_batch_size=2", "engine.deepspeed=zero3"]
    ddrl += ["rollout.prompts_per_step=3", "rollout.group_size=2", "algorithm.data_beta=0.5", "algorithm.kl_beta=0.1"]
    ddrl += ["validation.at_start=false", "sampling.eval_steps=1", "data.crop=centre", "data.clip=centre"]
    assert len(set(units(CaptionedFolder(images, max_bad_fraction=0).samples, 3, count=3))) > 1
    train("one", *ddrl, data=images)
    cached = [f"data.cache_dir={tmp_path / 'cache'}", "data.cache_latents=true"]
    train("two", *ddrl, *cached, data=images, ranks=2)
    assert 1 < len(list((tmp_path / "cache" / "latents").rglob("*.safetensors"))) <= 9  # the run has 9 groups
    assert_same_runs(tmp_path / "one", tmp_path / "two")


def test_cached_latents_do_not_change_training_on_videos_of_mixed_shapes(train, tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(6):
        write_clip(folder / f"{i}.mp4", count=12, size=[(32, 32), (32, 64)][i % 2])
        (folder / f"{i}.json").write_text(json.dumps({"prompt": f"fade number {i}"}))
    sft = ["wan21_video_sft", "validation.path=null", "validation.holdout=0.4"]
    sft += ["sampling={height: 32, width: 32, num_frames: 5, eval_steps: 1}", "data.buckets=auto", "data.fps=null"]
    sft += ["data.crop=centre", "data.clip=centre", "engine.micro_batch_size=2", "engine.gradient_accumulation=2"]
    train("plain", *sft, family="wan21", data=folder)
    kept = [f"data.cache_dir={tmp_path / 'cache'}", "data.cache_latents=true"]
    for name in ("first", "again"):
        train(name, *sft, *kept, family="wan21", data=folder)
    for name in ("first", "again"):
        assert_same_runs(tmp_path / "plain", tmp_path / name)
