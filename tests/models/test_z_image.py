"""Tests specific to Z-Image; test_families.py has the tests that all families share."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from families import CASES, EXACT, PROMPTS, denoise_latents, load_reference_pipeline, run_reference_pipeline
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.z_image import MASK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("z_image")


SIZE = (32, 48, 1)
LONG = "a red circle on white and the digit 7 in a blue square on white and the digit 3 " * 2


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("z_image"), CASES["z_image"])


def call_of(pipeline, **more):
    """Sample latents with the stock pipeline: fixed noise, two prompts, two steps."""
    noise = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 2, "max_sequence_length": 64}
    return pipeline(list(PROMPTS), **size, generator=noise, output_type="latent", **more).images


@pytest.mark.parametrize("size", [SIZE, (64, 128, 1)])  # 6 image tokens with padding, and 32 without
def test_texts_with_less_and_more_than_32_tokens_equal_the_stock_pipeline(model, pipeline, size):
    """The first position of an image depends on the length of its text."""
    prompts = [PROMPTS[0], LONG]
    shape = model.latent_shape(*size)
    grid = model.sigmas(3, shape)
    text = TextCache(model).encode(prompts)
    short, long = text[MASK].sum(1).tolist()
    assert short < 32 < long
    noise = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    want = run_reference_pipeline(
        pipeline, CASES["z_image"], grid, prompt=prompts, generator=noise, **model.pipeline_call_kwargs(4.0, *size)
    )
    noise = torch.cat([torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    uncond = model.encode_negative_text([""] * 2)
    got = denoise_latents(model, noise, text, grid, solver="ode", guidance_scale=4.0, uncond=uncond)
    torch.testing.assert_close(got, want, **EXACT)


# Behavior of diffusers: if one of these fails, diffusers has changed; then remove its row from docs/models/z_image.md.


def test_the_stock_pipeline_writes_its_template_into_the_caller_s_list(pipeline):
    prompts = list(PROMPTS)
    pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=64)
    assert all(written != prompt and prompt in written for written, prompt in zip(prompts, PROMPTS, strict=True))


def test_the_stock_pipeline_tells_a_shift_to_schedulers_that_have_one(pipeline):
    told = []

    class Noting(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
            told.append(mu)
            super().set_timesteps(sigmas=sigmas, device=device)

    pipeline.scheduler = Noting(shift=6.0)
    call_of(pipeline, guidance_scale=0.0)
    assert told[0] is not None
    assert not pipeline.scheduler.config.use_dynamic_shifting


def test_the_stock_guidance_is_one_less_than_w_and_on_below_1(pipeline):
    off, on = (call_of(pipeline, guidance_scale=g) for g in (0.0, 0.5))
    assert (off - on).abs().max() > 1e-3


def test_the_stock_pipeline_normalizes_and_truncates_guidance_only_on_request(pipeline):
    plain = call_of(pipeline, guidance_scale=4.0)
    assert torch.equal(plain, call_of(pipeline, guidance_scale=4.0, cfg_truncation=1.0, cfg_normalization=False))
    # `True` means a factor of 1; the norm is over the whole image.
    assert torch.equal(
        call_of(pipeline, guidance_scale=4.0, cfg_normalization=True),
        call_of(pipeline, guidance_scale=4.0, cfg_normalization=1.0),
    )
    for change in ({"cfg_normalization": True}, {"cfg_truncation": 0.1}):
        assert (plain - call_of(pipeline, guidance_scale=4.0, **change)).abs().max() > 1e-3
