"""Whole runs of video families exclude conditioning frames from the loss. Several ranks can write one tiny pipeline."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from clips import write_clip
from families import CASES
from multi_rank.resuming import train_on_rank
from wfm_ds.algorithms.sft import validation_sigmas
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.datasets import build_buckets
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import draw_centre
from wfm_ds.models import registry
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.recipe import file as recipe_file
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.seeds import derive_seed, draw_uniform

ROOT = Path(__file__).parent.parent.parent
GIVEN_RECIPE = ROOT / "tests" / "recipes" / "cosmos25_sft.yaml"
GIVEN = ["cosmos25", "sana_video", "wan22_ti2v"]
NUM_VIDEOS, NUM_FRAMES, SIDE = 3, 9, 64


def resolve_and_load(cache):
    import os

    os.environ["WFM_CACHE"] = cache
    model = registry.load_model("tiny:digits", dtype=torch.float32, device="cpu")
    return {"folder": str(model.path)}


@pytest.mark.long
def test_ranks_that_write_a_tiny_pipeline_at_once_all_find_it_complete(two_ranks, tmp_path):
    """transformers saves on rank 0 only. A faster rank must not publish a folder without text encoders."""
    folders = {answer["folder"] for answer in two_ranks.run(resolve_and_load, cache=str(tmp_path))}
    assert len(folders) == 1
    assert [entry.name for entry in Path(folders.pop()).parent.iterdir()] == ["digits"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Videos of noise, so that every frame affects the loss."""
    folder, random = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    for i in range(NUM_VIDEOS):
        pictures = random.integers(0, 256, (NUM_FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
        write_clip(folder / f"{i}.mp4", size=(SIDE, SIDE), pictures=pictures)
        (folder / f"{i}.json").write_text(json.dumps({"prompt": f"the digit {i}"}))
    return folder


def by_hand(model, recipe, folder):
    """Return the mean squared error without conditioning frames, for each video and noise level."""
    losses, most = [], recipe.algorithm.max_num_conditional_frames
    sigmas = validation_sigmas(model.flow_shift(recipe.sampling)).float()
    for sample in CaptionedFolder(folder, max_bad_fraction=0).samples:
        pixels = (
            torch.from_numpy(load_media(sample.media, build_buckets(recipe, model).framings[0], draw_centre)).float()
            / 255
        )
        clean = model.encode_pixels(pixels.permute(3, 0, 1, 2)[None])
        for j, sigma in enumerate(sigmas):
            noise = draw_cpu_normal([derive_seed(0, "validation_noise", sample.id, j)], clean.shape[1:])
            count = int((most + 1) * draw_uniform(0, "validation_conditional_frames", sample.id, j))
            conditioning = add_clean_frames(model.encode_text([sample.prompt.text]), clean, torch.tensor([count]))
            with torch.no_grad():
                velocity = model.denoise((1 - sigma) * clean + sigma * noise, sigma.view(1), conditioning)
            losses.append(float((velocity - (noise - clean))[:, :, count:].double().square().mean()))
    return losses


@pytest.mark.parametrize("family", GIVEN)
def test_validation_loss_excludes_conditioning_frames(one_rank, tiny_pipelines, videos, family, tmp_path):
    options = CASES[family].load_options
    model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu", **options)
    height, width, _ = CASES[family].size
    overrides = [
        f"run.output_dir={tmp_path / 'out'}",
        f"model.path={model.path}",
        f"model.guardrail={options.get('guardrail', 'stock')}",
        *(f"{section}.path={videos}" for section in ("data", "validation")),
        f"algorithm.max_num_conditional_frames={max(model.conditioning_frame_counts)}",
        f"sampling={{height: {height}, width: {width}, num_frames: {NUM_FRAMES}, eval_steps: 1}}",
        *("run.steps=2", "engine.micro_batch_size=2", "ema=null"),
        *("validation.every=0", "validation.num_prompts=1", "logging.console=false"),
    ]
    outcome = one_rank.run(train_on_rank, recipe=str(GIVEN_RECIPE), overrides=overrides)[0]
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    want = by_hand(model, recipe_file.load_recipe(GIVEN_RECIPE, overrides), videos)
    assert metrics[0]["val/loss"] == pytest.approx(statistics.mean(want), rel=1e-5)
    assert outcome["step"] == 2
    trained = [line["sft/loss"] for line in metrics if "sft/loss" in line]
    assert all(0 < loss < 100 for loss in trained)
    assert metrics[-1]["val/loss"] != metrics[0]["val/loss"]
