"""What is particular to Stable Diffusion 3; what holds for every family is in test_families.py."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from families import CASES, PROMPTS, load_reference_pipeline
from wfm_ds.models import registry


def one_call(model):
    """Arguments of one `denoise`."""
    noise = torch.randn((2, *model.latent_shape(32, 48)), generator=torch.Generator().manual_seed(3))
    return noise, torch.tensor([0.9, 0.3]), model.encode_text(PROMPTS)


def test_encoding_inverts_decoding_for_pixels(load):
    model = load("digits")
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.decode_latents(model.encode_pixels(pixels)), pixels, rtol=0, atol=1e-4)


@given(height=st.integers(-8, 200), width=st.integers(-8, 200))
@settings(max_examples=100, deadline=None)
def test_exactly_the_sizes_that_the_network_takes_have_a_shape(load, height, width):
    model = load("sd3")  # VAE factor 2, patch 2, positions for 32 patches: multiples of 4 up to 128
    if all(size % 4 == 0 and 4 <= size <= 128 for size in (height, width)):
        assert model.latent_shape(height, width) == (4, height // 2, width // 2)
    else:
        with pytest.raises(ValueError, match="multiple of 4, from 4 to 128"):
            model.latent_shape(height, width)


def test_the_largest_size_runs(load):
    model = load("digits")
    latents = torch.randn(1, *model.latent_shape(8, 8))
    assert model.denoise(latents, torch.ones(1), model.encode_text(PROMPTS[:1])).shape == latents.shape
    with pytest.raises(ValueError, match="from 2 to 8"):
        model.latent_shape(10, 8)


def test_tokens_are_patches(load):
    assert load("sd3").num_tokens((4, 16, 24)) == 16 * 24 // 4


def test_wrong_pixels_are_refused(load):
    model = load("sd3")
    with pytest.raises(ValueError, match="width must be a multiple of 4"):
        model.encode_pixels(torch.rand(1, 3, 32, 30))
    with pytest.raises(ValueError, match="float32"):
        model.encode_pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[B,3,H,W\]"):
        model.encode_pixels(torch.rand(3, 32, 32))
    with pytest.raises(ValueError, match="num_frames"):
        model.latent_shape(32, 32, num_frames=5)


def test_the_network_gets_its_time_as_an_unrounded_float(load):
    model = load("sd3")
    seen = []
    handle = model.denoiser.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    latents, _, conditioning = one_call(model)
    model.denoise(latents, torch.tensor([1.0, 0.12345]), conditioning)
    handle.remove()
    assert seen[0]["timestep"].dtype == torch.float32
    torch.testing.assert_close(seen[0]["timestep"], torch.tensor([1000.0, 123.45]))


def test_another_stage_is_refused(load):
    model = load("sd3")
    arguments = one_call(model)
    assert torch.equal(model.denoise(*arguments, expert=0), model.denoise(*arguments))
    with pytest.raises(ValueError, match="expert 1"):
        model.denoise(*arguments, expert=1)


def test_a_shift_by_resolution_follows_the_pipeline(tiny_pipelines):
    model = registry.load_model(tiny_pipelines("sd3"), dtype=torch.float32, device="cpu")
    pipeline = load_reference_pipeline(tiny_pipelines("sd3"), CASES["sd3"])
    for holder in (model.pipeline, pipeline):
        holder.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=16)
    grids = []
    for height, width in [(32, 32), (64, 32)]:
        call = model.pipeline_call_kwargs(1.0, height, width)
        pipeline(PROMPTS, num_inference_steps=4, output_type="latent", **call)
        grids.append(model.sigmas(4, model.latent_shape(height, width)))
        torch.testing.assert_close(grids[-1], pipeline.scheduler.sigmas.double(), rtol=0, atol=0)
    assert not torch.equal(*grids)
