"""Tests specific to Wan: text encoding, timesteps, its two experts and supported variants.

test_families.py compares the family with the stock pipelines.
"""

import pytest
import torch
from diffusers import DiffusionPipeline

from families import (
    CASES,
    EXACT,
    PROMPTS,
    copy_pipeline,
    load_tiny,
    record_calls,
)
from wfm_ds.models import registry
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.wan import Experts
from wfm_ds.sampling.latents import draw_cpu_normal

FAMILIES = ("wan21", "wan22", "wan22_ti2v")


def noise_for(model, family):
    return draw_cpu_normal([1, 2], model.latent_shape(*CASES[family].size))


# Text


def test_rows_past_the_prompt_are_zero(load):
    embeds = load("wan21").encode_text(["the digit 7"])["prompt_embeds"][0]
    assert embeds.shape == (16, 32)
    assert bool(embeds[:4].any(1).all())  # three words and the end token
    assert not embeds[4:].any()


def test_text_is_repaired_as_at_inference(load):
    """Diffusers silently skips this repair if ftfy is not installed."""
    broken, meant = "a cat\u00e2\u20ac\u2122s  digit &amp; 7", "a cat's digit & 7"
    embeds = load("wan21").encode_text([broken, meant])["prompt_embeds"]
    assert torch.equal(embeds[0], embeds[1])


# Sizes


def test_the_first_latent_frame_depends_on_the_first_frame_alone(load):
    """Therefore an image can condition a video of any length."""
    model = load("wan22_ti2v")
    pixels = torch.rand(1, 3, 9, 64, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.encode_pixels(pixels)[:, :, :1], model.encode_pixels(pixels[:, :, :1]), **EXACT)


# Timesteps


def test_ti2v_gets_a_time_per_token_and_0_on_conditioning_frames(load):
    model, noise = load("wan22_ti2v"), noise_for(load("wan22_ti2v"), "wan22_ti2v")  # 3 frames of 2 x 1 tokens
    conditioning = add_clean_frames(model.encode_text(PROMPTS), noise, torch.tensor([1, 0]))
    with record_calls(model.denoiser) as calls, torch.no_grad():
        model.denoise(noise, torch.tensor([0.5, 0.25]), conditioning)
    want = torch.tensor([[0.0, 0, 500, 500, 500, 500], [250.0] * 6])
    torch.testing.assert_close(calls[0]["timestep"], want)


def test_only_ti2v_takes_conditioning_frames(load):
    allowed = {family: load(family).conditioning_frame_counts for family in FAMILIES}
    assert allowed == {"wan21": (0,), "wan22": (0,), "wan22_ti2v": (0, 1)}


# Experts


def test_each_noise_level_reaches_its_expert(load):
    model = load("wan22")
    assert model.sigma_ranges == ((0.875, 1.0), (0.0, 0.875))
    assert [model.select_expert(s) for s in (1.0, 0.9, 0.875, 0.8749, 1e-6)] == [0, 0, 0, 1, 1]
    model.boundary_ratio = 0.9
    assert {model.select_expert(s) for s in (0.9, float(torch.tensor(0.9)))} == {0}  # the second one is below 0.9
    model.boundary_ratio = 0.875
    noise, text = noise_for(model, "wan22"), model.encode_text(PROMPTS)
    outputs = []
    for level, expert, other in ((0.875, 0, 1), (0.8749, 1, 0)):
        sigma = torch.full((2,), level)
        parts = model.pipeline
        with record_calls(parts.transformer) as high, record_calls(parts.transformer_2) as low, torch.no_grad():
            chosen = model.denoise(noise, sigma, text)
        assert (len(high), len(low)) == (1 - expert, expert)
        with torch.no_grad():
            outputs.append(model.denoise(noise, sigma, text, expert))
        assert torch.equal(outputs[-1], chosen)
        with pytest.raises(ValueError, match="all of sigma must belong to one expert"):
            model.denoise(noise, sigma, text, other)
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


def test_a_batch_of_both_experts_is_refused(load):
    model, noise = load("wan22"), noise_for(load("wan22"), "wan22")
    with pytest.raises(ValueError, match="all of sigma must belong to one expert"):
        model.denoise(noise, torch.tensor([0.9, 0.8]), model.encode_text(PROMPTS))


def test_the_denoiser_contains_both_experts_and_the_rest_is_frozen(load):
    model = load("wan22")
    assert isinstance(model.denoiser, Experts)
    assert model.denoiser_components == ("transformer", "transformer_2")
    assert model.denoiser.networks == [model.pipeline.transformer, model.pipeline.transformer_2]
    assert model.auxiliary_modules() == [model.pipeline.vae, model.pipeline.text_encoder]
    assert load("wan21").denoiser is load("wan21").pipeline.transformer
    assert load("wan21").denoiser_components == ("transformer",)


def test_training_from_scratch_gives_each_expert_weights_of_its_own(tiny_pipelines):
    model = load_tiny(tiny_pipelines("wan22"), "wan22")
    before = [p.clone() for p in model.denoiser.parameters()]
    registry.randomize_denoiser(model, 3)
    first, second = (list(part.parameters()) for part in model.denoiser.networks)
    drawn = [i for i, p in enumerate(first) if p.ndim > 1]
    for old, new in ((before[: len(first)], first), (before[len(first) :], second), (first, second)):
        assert not any(torch.equal(old[i], new[i]) for i in drawn)


# Variants


AS_IMAGE_TO_VIDEO = {
    "_class_name": "WanImageToVideoPipeline",
    "image_encoder": [None, None],
    "image_processor": [None, None],
}


def test_ti2v_may_be_stored_as_an_image_to_video_pipeline(load, tiny_pipelines, tmp_path):
    folder = copy_pipeline(tiny_pipelines("wan22_ti2v"), tmp_path / "pipeline", **AS_IMAGE_TO_VIDEO)
    model = registry.load_model(folder, dtype=torch.float32, device="cpu")
    arguments = noise_for(model, "wan22_ti2v"), torch.tensor([0.7, 0.3]), model.encode_text(PROMPTS)
    with torch.no_grad():
        assert torch.equal(model.denoise(*arguments), load("wan22_ti2v").denoise(*arguments))


# Unexpected behavior of diffusers. A failing test means that a workaround can be removed.


def test_only_the_pipelines_class_accepts_a_missing_second_denoiser(load, tiny_pipelines):
    """`DiffusionPipeline` ignores passed components that the class lists as optional; our loader calls the class."""
    ours, folder = load("wan21").pipeline.transformer, tiny_pipelines("wan21")
    assert DiffusionPipeline.from_pretrained(folder, transformer=ours).transformer is not ours


def test_the_stock_scheduler_rounds_the_time_down(load):
    """Therefore comparisons use GridEuler: the network is trained and called here with the exact timestep."""
    scheduler = load("wan21").pipeline.scheduler
    scheduler.set_timesteps(5)
    assert scheduler.timesteps.dtype == torch.int64
    assert torch.equal(scheduler.timesteps, (1000 * scheduler.sigmas[:-1]).long())
