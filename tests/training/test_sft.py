import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from wfm_ds.algorithms import build_supervised_algorithm
from wfm_ds.data.batch_reader import TrainingSample
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.distributed.world import World
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import NegativeText
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.training.sft import SftLoop, ValidationLoss
from wfm_ds.types import Prompt


def captions(root, share):
    """Return the captions used in training for 200 images that are all captioned "a cat"."""
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", [f"data.caption_dropout={share}"])
    trainer = SimpleNamespace(job=SimpleNamespace(recipe=recipe))
    pixels, prompt = np.zeros((1, 1, 3), np.uint8), Prompt(id="a", text="a cat")
    file, size = LocalFile(Path("a.png")), Framing(height=1, width=1)
    images = [
        TrainingSample(
            sample_id=f"{i}", prompt=prompt, media=file, framing=size, pixels=pixels, position=i, epoch=i % 2
        )
        for i in range(200)
    ]
    return [SftLoop.sample_caption(trainer, image) for image in images]


def test_dropped_captions_become_the_unconditional_text_of_guidance(root):
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
@pytest.mark.slow
def test_validation_encodes_each_image_once_and_keeps_one_batch(
    root, tiny_pipelines, alone, tmp_path, monkeypatch, batch
):
    samples = []
    for i in range(3):
        Image.new("RGB", (8, 8), (90 * i, 0, 0)).save(tmp_path / f"{i}.png")
        samples.append(Sample(id=f"{i}", media=LocalFile(tmp_path / f"{i}.png"), prompt=Prompt(id=f"{i}", text="a")))
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", [f"engine.max_forward_batch={batch}"])
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    encoded, sizes, encode = [], [], model.encode_uint8
    monkeypatch.setattr(model, "encode_uint8", lambda media: encoded.append(len(media)) or encode(media))

    def forward(purpose, latents, sigma, conditioning, expert):
        sizes.append(len(latents))
        return model.denoise(latents, sigma, conditioning, expert)

    engine = SimpleNamespace(use_policy=lambda name: contextlib.nullcontext())
    texts = TextCache(model)
    job = SimpleNamespace(
        recipe=recipe,
        model=model,
        world=alone,
        engine=engine,
        evaluation_policy="ema",
        text_cache=texts,
        sampler=Sampler(model=model, text_cache=texts, settings=recipe.sampling, forward=forward),
        latent_cache=None,
        forward=forward,
    )
    losses = ValidationLoss(
        job, build_supervised_algorithm(recipe), samples, [Framing(height=8, width=8)] * 3
    ).measure_loss()
    assert encoded == [1, 1, 1]
    assert (sum(sizes), max(sizes)) == (24, min(batch, 24))
    assert losses["val/loss"] > 0


def pair(position):
    """Return a training pair of two images with different shades."""

    def shade(value, rejected=None):
        return TrainingSample(
            sample_id=f"{position}",
            prompt=Prompt(id="a", text=f"shade {position}"),
            media=LocalFile(Path("a.png")),
            framing=Framing(height=16, width=16),
            pixels=np.full((16, 16, 3), value, np.uint8),
            position=position,
            epoch=0,
            rejected=rejected,
        )

    return shade(20 * position, shade(20 * position + 90))


def test_both_media_of_a_pair_get_one_noise_one_level_and_one_caption(root, tiny_pipelines, alone):
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_dpo.yaml", ["data.caption_dropout=0.5"])
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    sampler = Sampler(model=model, text_cache=None, settings=recipe.sampling, forward=None)
    job = SimpleNamespace(
        recipe=recipe,
        model=model,
        world=alone,
        latent_cache=None,
        run_sizes=derive_run_sizes(recipe, 1),
        sampler=sampler,
    )
    loop = SftLoop(job, build_supervised_algorithm(recipe), None, None, None, None)
    loop.step = 1
    samples = [pair(position) for position in range(8)]
    first, second = loop.micro_batches(samples).iterate(release=True)
    for micro, part in ((first.batch, samples[:4]), (second.batch, samples[4:])):
        assert torch.equal(micro.noise[:4], micro.noise[4:])
        assert torch.equal(micro.sigma[:4], micro.sigma[4:])
        assert micro.texts[:4] == micro.texts[4:]
        for row, sample in enumerate([*part, *(sample.rejected for sample in part)]):
            torch.testing.assert_close(
                micro.clean_latents[row], model.encode_uint8([sample.pixels])[0], rtol=1e-4, atol=1e-5
            )
        sigma = micro.sigma.view(-1, 1, 1, 1)
        torch.testing.assert_close(micro.latents, (1 - sigma) * micro.clean_latents + sigma * micro.noise)
    assert len({float(s) for s in torch.cat([first.batch.sigma, second.batch.sigma])}) == 8
    assert not torch.equal(first.batch.noise[0], first.batch.noise[1])
