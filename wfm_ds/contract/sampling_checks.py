"""Checks of sampling against the diffusers pipeline."""

from __future__ import annotations

import torch

from wfm_ds.contract.case import PROMPTS, denoise_latents, run_reference_pipeline
from wfm_ds.contract.family_under_test import (
    CheckNotApplicable,
    FamilyUnderTest,
    fail_unless,
    require_close,
    require_effect,
)
from wfm_ds.errors import ModelError
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.types import Conditioning

GUIDANCE_SCALE = 4.0
MIN_PROMPT_EFFECT = 1e-3  # minimum pixel difference between two prompts, pixels in [0, 1]


def check_latents_without_guidance(subject: FamilyUnderTest) -> None:
    """Check that wfm_ds and diffusers generate the same latents without guidance, for two prompts in one batch."""
    _require_same_latents(subject, 1.0, None)


def check_latents_with_guidance(subject: FamilyUnderTest) -> None:
    """Check that wfm_ds and diffusers generate the same latents with guidance and the default negative prompt."""
    _skip_unsupported_guidance(subject, GUIDANCE_SCALE)
    _require_same_latents(subject, GUIDANCE_SCALE, None)


def check_latents_with_another_embedded_guidance(subject: FamilyUnderTest) -> None:
    """Check that wfm_ds and diffusers generate the same latents with twice the default embedded guidance scale."""
    if subject.model.embedded_guidance is None:
        raise CheckNotApplicable("the network does not support embedded guidance")
    other = subject.load_model(embedded_guidance=2 * subject.model.embedded_guidance)
    grid = other.sigmas(5, subject.latent_shape)
    call = subject.pipeline_call_kwargs(1.0) | other.pipeline_call_kwargs(1.0, *subject.size)
    got = subject.sample_latents(other, 5)
    require_close(
        "the latents with another embedded guidance",
        got,
        subject.reference_latents(subject.load_reference_pipeline(), grid, **call),
        subject.case.tolerance,
    )
    default = subject.sample_latents(subject.model, 5)
    require_effect("doubling the embedded guidance changes the latents", got, default, 10 * subject.case.tolerance)


def _skip_unsupported_guidance(subject: FamilyUnderTest, w: float) -> None:
    height, width, frames = subject.size
    try:
        subject.model.check_sampling(SamplingRecipe(height=height, width=width, num_frames=frames, guidance_scale=w))
    except ModelError as error:
        raise CheckNotApplicable(str(error)) from error


def check_latents_with_a_negative_prompt(subject: FamilyUnderTest) -> None:
    """Check that wfm_ds and diffusers generate the same latents with guidance and a custom negative prompt."""
    if not subject.case.takes_negative_prompt:
        raise CheckNotApplicable("the diffusers pipeline has no negative prompt")
    _require_same_latents(subject, GUIDANCE_SCALE, "a blue square")


def _require_same_latents(subject: FamilyUnderTest, w: float, negative: str | None) -> None:
    model, case = subject.model, subject.case
    grid = model.sigmas(5, subject.latent_shape)
    call = subject.pipeline_call_kwargs(w, **({} if negative is None else {"negative_prompt": negative}))
    want = subject.reference_latents(subject.load_reference_pipeline(), grid, **call)
    uncond = subject.encode_negative_prompt(model, negative) if w > 1 else None
    cond = subject.encode_prompts(model, PROMPTS)
    got = denoise_latents(model, subject.initial_noise(), cond, grid, solver="ode", guidance_scale=w, uncond=uncond)
    require_close(f"the latents of two prompts at guidance scale {w:g}", got, want, case.tolerance)


def check_decoded_pixels(subject: FamilyUnderTest) -> None:
    """Check that wfm_ds and diffusers decode latents to the same pixels.

    The result of to_uint8 must have the axes [B,H,W,3] for images or [B,F,H,W,3] for videos.
    """
    model, case = subject.model, subject.case
    pipeline, grid = subject.load_reference_pipeline(), model.sigmas(2, subject.latent_shape)
    latents = subject.reference_latents(pipeline, grid, **subject.pipeline_call_kwargs(1.0))
    want = run_reference_pipeline(pipeline, case, grid, **subject.pipeline_call_kwargs(1.0), output_type="pt")
    got = model.decode_latents(latents)
    require_close("the decoded pixels", got, want, case.tolerance)
    height, width, frames = subject.size
    layout = (2, *((frames,) if model.is_video else ()), height, width, 3)
    fail_unless(model.to_uint8(got).shape == layout, f"to_uint8 returns {model.to_uint8(got).shape}, not {layout}")


def check_several_samples_of_a_prompt(subject: FamilyUnderTest) -> None:
    """Check that a prompt has the same embedding whether it occurs once or three times in a batch.

    The result of encode_text must have the keys in `conditioning_keys`, and no gradient.
    """
    subject.require_texts_without_images()
    model = subject.model
    once, often = model.encode_text(PROMPTS), model.encode_text([prompt for prompt in PROMPTS for _ in range(3)])
    message = f"encode_text returns {sorted(once)}, but conditioning_keys is {sorted(model.conditioning_keys)}"
    fail_unless(once.keys() == often.keys() == model.conditioning_keys, message)
    for name, rows in _repeat_rows(once, 3).items():
        fail_unless(not rows.requires_grad, f"encode_text keeps the gradient of {name}; use torch.no_grad")
        require_close(f"the repeated {name}", rows, often[name], subject.case.tolerance)


def _repeat_rows(conditioning: Conditioning, k: int) -> Conditioning:
    return {name: rows.repeat_interleave(k, dim=0) for name, rows in conditioning.items()}


def check_stacked_texts(subject: FamilyUnderTest) -> None:
    """Check that prompts encoded one by one and prompts encoded together give the same velocities."""
    subject.require_texts_without_images()
    model = subject.model
    latents, sigma, _ = subject.denoise_arguments(model)
    shared = subject.encode_required_inputs(model)
    stacked = model.stack_conditioning([model.encode_text([prompt]) for prompt in PROMPTS])
    with torch.no_grad():
        want, got = (model.denoise(latents, sigma, text | shared) for text in (model.encode_text(PROMPTS), stacked))
    require_close("the velocities of stacked texts", got, want, subject.case.tolerance)


def check_prompts_matter(subject: FamilyUnderTest) -> None:
    """Check that different prompts give different samples from the same noise."""
    model = subject.model
    noise = subject.initial_noise(1)
    noise = noise.repeat(2, *[1] * (noise.ndim - 1))
    text = subject.encode_texts(model, PROMPTS, subject.sample_inputs()[:1] * 2)
    conditioning = text | _repeat_rows(subject.encode_required_inputs(model, 1), 2)
    latents = denoise_latents(model, noise, conditioning, model.sigmas(2, subject.latent_shape), solver="ode")
    one, other = model.decode_latents(latents)
    require_effect("the pixels of two prompts differ", one, other, MIN_PROMPT_EFFECT)


def check_grid_ends_at_clean_latents(subject: FamilyUnderTest) -> None:
    """Check that integrating the exact velocity along the pipeline's sigmas ends at the clean latents."""
    model = subject.model
    clean, latents = subject.initial_noise(), subject.initial_noise().flip(0)
    grid = model.sigmas(10, subject.latent_shape)
    for s, s_next in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        latents = latents + (s_next - s) * (latents - clean) / s
    require_close("the end of the exact trajectory", latents, clean, 1e-5)


def check_conditioning_frames(subject: FamilyUnderTest) -> None:
    """Check that conditioning frames stay unchanged and affect the other frames.

    The generated latents must equal the latents that diffusers generates.
    """
    model, case = subject.model, subject.case
    if case.conditioning_frames_call is None:
        raise CheckNotApplicable("the case has no conditioning_frames_call")
    pixels, noise = subject.random_pixels(1), subject.initial_noise(1)
    latents, grid = model.encode_pixels(pixels), model.sigmas(4, subject.latent_shape)
    text = subject.encode_prompts(model, PROMPTS[:1])
    for count in [n for n in model.conditioning_frame_counts if n > 0]:
        pipeline, call = case.conditioning_frames_call(subject.folder, pixels, count)
        call = model.pipeline_call_kwargs(1.0, *subject.size) | {"prompt": PROMPTS[:1], "latents": noise} | call
        want = subject.reference_latents(pipeline, grid, **call)
        conditioning = add_clean_frames(text, latents, torch.tensor([count]))
        got = denoise_latents(model, noise, conditioning, grid, solver="ode")
        require_close(f"the latents with {count} conditioning frames", got, want, case.tolerance)
        require_close(f"the {count} conditioning frames", got[:, :, :count], latents[:, :, :count], case.tolerance)
        free = denoise_latents(model, noise, text, grid, solver="ode")
        what = f"{count} conditioning frames change the other frames"
        require_effect(what, got[:, :, count:], free[:, :, count:], 1e-3)
