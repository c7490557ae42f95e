from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from wfm_ds.data.order import TrainingSample
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.distributed.world import World
from wfm_ds.models import registry
from wfm_ds.models.base import NegativeText
from wfm_ds.models.text_cache import TextCache
from wfm_ds.recipe import file as recipe_file
from wfm_ds.training.sft import SftLoop, ValidationLoss
from wfm_ds.types import Prompt


def captions(root, share):
    """What two hundred images, all captioned "a cat", are trained on."""
    recipe = recipe_file.load(root / "recipes" / "tiny" / "sd3_sft.yaml", [f"data.caption_dropout={share}"])
    trainer = SimpleNamespace(job=SimpleNamespace(recipe=recipe))
    pixels, prompt = np.zeros((1, 1, 3), np.uint8), Prompt(id="a", text="a cat")
    file, size = LocalFile(Path("a.png")), Framing(height=1, width=1)
    images = [
        TrainingSample(
            sample_id=f"{i}", prompt=prompt, media=file, framing=size, pixels=pixels, position=i, epoch=i % 2
        )
        for i in range(200)
    ]
    return [SftLoop.caption(trainer, image) for image in images]


def test_dropped_captions_are_what_guidance_contrasts_with(root):
    assert captions(root, 0.0) == ["a cat"] * 200
    assert captions(root, 1.0) == [NegativeText("")] * 200
    some = captions(root, 0.25)
    assert set(some) == {"a cat", NegativeText("")}
    assert 30 < some.count(NegativeText("")) < 70
    assert captions(root, 0.25) == some


@pytest.fixture
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield World(0, 1, 0, torch.device("cpu"), None)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_validation_encodes_each_image_once_and_keeps_no_more_than_a_batch_of_them(
    root, tiny_pipelines, alone, tmp_path, monkeypatch, batch
):
    samples = []
    for i in range(3):
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / f"{i}.png")
        samples.append(Sample(id=f"{i}", media=LocalFile(tmp_path / f"{i}.png"), prompt=Prompt(id=f"{i}", text="a")))
    recipe = recipe_file.load(root / "recipes" / "tiny" / "sd3_sft.yaml", [f"engine.max_forward_batch={batch}"])
    model = registry.load(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    encoded, sizes, encode = [], [], model.encode_media
    monkeypatch.setattr(model, "encode_media", lambda media: encoded.append(len(media)) or encode(media))

    def forward(purpose, latents, sigma, conditioning, expert):
        sizes.append(len(latents))
        return model.denoise(latents, sigma, conditioning, expert)

    job = SimpleNamespace(
        recipe=recipe, model=model, world=alone, texts=TextCache(model), latents=None, forward=forward
    )
    losses = ValidationLoss(job, samples, [Framing(height=8, width=8)] * 3).measure()
    assert encoded == [1, 1, 1]
    assert (sum(sizes), max(sizes)) == (24, min(batch, 24))
    assert losses["val/loss"] > 0
