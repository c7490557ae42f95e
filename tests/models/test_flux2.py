"""Tests specific to FLUX.2-klein; test_families.py has the tests that all families share."""

import inspect

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline

from families import CASES, EXACT, PROMPTS, load_reference_pipeline, load_tiny
from wfm_ds.errors import ModelError
from wfm_ds.recipe.sampling import SamplingRecipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("flux2")


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("flux2"), CASES["flux2"])


def test_a_distilled_pipeline_refuses_guidance(tiny_pipelines):
    distilled = load_tiny(tiny_pipelines("flux2"), "flux2")
    distilled.pipeline.register_to_config(is_distilled=True)
    distilled.check_sampling(SamplingRecipe(height=32, width=32, guidance_scale=1.0))
    with pytest.raises(ModelError, match=r"is distilled and ignores guidance; set sampling\.guidance_scale: 1"):
        distilled.check_sampling(SamplingRecipe(height=32, width=32, guidance_scale=4.0))


# Behavior of diffusers: if one of these fails, diffusers has changed; then remove its row from docs/models/flux2.md.


def test_the_stock_call_takes_no_negative_prompt():
    assert "negative_prompt" not in inspect.signature(Flux2KleinPipeline.__call__).parameters


def test_the_stock_call_returns_latents_that_its_own_loop_cannot_take_back(pipeline):
    call = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 8, "output_type": "latent"}
    latents = pipeline(prompt=PROMPTS[:1], **call).images
    assert latents.shape == (1, 4, 16, 16)  # but `latents` must be [1, 16, 8, 8]
    with pytest.raises(RuntimeError):
        pipeline(prompt=PROMPTS[:1], latents=latents, **call)


def test_the_vae_s_statistics_are_its_batch_norm_s(model):
    assert isinstance(model.pipeline.vae, AutoencoderKLFlux2)
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    z = model.pipeline._encode_vae_image(2 * pixels - 1, None)
    torch.testing.assert_close(model.encode_pixels(pixels), z, **EXACT)
