"""Checks of sampling: latents and pixels equal the diffusers pipeline's."""

from __future__ import annotations

import torch

from wfm_ds.contract.case import PROMPTS, denoise_latents, draw
from wfm_ds.contract.subject import DoesNotApply, Subject, require, require_close
from wfm_ds.errors import ModelError
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.recipe.sampling import SamplingRecipe

W = 4.0
PROMPT_MATTERS = 1e-3  # minimum pixel difference between two prompts, pixels in [0, 1]


def latents_without_guidance(subject: Subject) -> None:
    """Our loop generates the same latents as diffusers, for two prompts in one batch."""
    _same_latents(subject, 1.0, None)


def latents_with_guidance(subject: Subject) -> None:
    """The same with guidance and the pipeline's default negative prompt."""
    _require_drawn_with(subject, W)
    _same_latents(subject, W, None)


def latents_with_another_embedded_guidance(subject: Subject) -> None:
    """Another embedded guidance scale changes the latents, as in diffusers."""
    if subject.model.embedded_guidance is None:
        raise DoesNotApply("the network does not support embedded guidance")
    other = subject.fresh(embedded_guidance=2 * subject.model.embedded_guidance)
    grid = other.sigmas(5, subject.shape)
    call = subject.call(1.0) | other.pipeline_call(1.0, *subject.size)
    got = subject.sampled(other, 5)
    require_close(
        "the latents with another embedded guidance",
        got,
        subject.drawn(subject.stock(), grid, **call),
        subject.case.close,
    )
    difference = float((got - subject.sampled(subject.model, 5)).abs().max())
    require(
        difference > 10 * subject.case.close,
        f"doubling the embedded guidance changes the latents by only {difference:.1g}",
    )


def _require_drawn_with(subject: Subject, w: float) -> None:
    """Raise CheckNotApplicable if the family does not support this guidance scale."""
    height, width, frames = subject.size
    try:
        subject.model.check_sampling(SamplingRecipe(height=height, width=width, num_frames=frames, guidance_scale=w))
    except ModelError as error:
        raise DoesNotApply(str(error)) from error


def latents_with_a_negative_prompt(subject: Subject) -> None:
    """The same with a negative prompt."""
    if not subject.case.negative_prompt:
        raise DoesNotApply("the diffusers pipeline has no negative prompt")
    _same_latents(subject, W, "a blue square")


def _same_latents(subject: Subject, w: float, negative: str | None) -> None:
    model, case = subject.model, subject.case
    grid = model.sigmas(5, subject.shape)
    call = subject.call(w, **({} if negative is None else {"negative_prompt": negative}))
    want = subject.drawn(subject.stock(), grid, **call)
    negative_text = model.caption(model.null_text(negative), *subject.size, negative=True)
    uncond = model.encode_negative([negative_text] * 2) | subject.besides(model) if w > 1 else None
    cond = subject.told(model, PROMPTS)
    got = denoise_latents(model, subject.noise(), cond, grid, solver="ode", guidance_scale=w, uncond=uncond)
    require_close(f"the latents of two prompts at guidance scale {w:g}", got, want, case.close)


def decoded_pixels(subject: Subject) -> None:
    """Decoded pixels equal diffusers' and have the documented layout."""
    model, case = subject.model, subject.case
    pipeline, grid = subject.stock(), model.sigmas(2, subject.shape)
    latents = subject.drawn(pipeline, grid, **subject.call(1.0))
    want = draw(pipeline, case, grid, **subject.call(1.0), output_type="pt")
    got = model.decode(latents)
    require_close("the decoded pixels", got, want, case.close)
    height, width, frames = subject.size
    layout = (2, *((frames,) if model.video else ()), height, width, 3)
    require(model.to_uint8(got).shape == layout, f"to_uint8 returns {model.to_uint8(got).shape}, not {layout}")


def several_samples_of_a_prompt(subject: Subject) -> None:
    """Repeating conditioning rows equals encoding the prompt several times."""
    model = subject.model
    repeated = model.repeat(model.encode_text(PROMPTS), 3)
    encoded = model.encode_text([prompt for prompt in PROMPTS for _ in range(3)])
    for method, rows in (("repeat_conditioning", repeated), ("encode_text", encoded)):
        message = f"{method} returns {sorted(rows)}, but conditioning_keys is {sorted(model.conditioning_keys)}"
        require(rows.keys() == model.conditioning_keys, message)
    for name in repeated:
        require(not repeated[name].requires_grad, f"encode_text keeps the gradient of {name}; use torch.no_grad")
        require_close(f"the repeated {name}", repeated[name], encoded[name], subject.case.close)


def texts_stacked(subject: Subject) -> None:
    """Texts encoded separately and stacked give the same velocities as texts encoded together."""
    model = subject.model
    latents, sigma, _ = subject.one_call(model)
    shared = subject.besides(model)
    stacked = model.stack([model.encode_text([prompt]) for prompt in PROMPTS])
    with torch.no_grad():
        want, got = (model.denoise(latents, sigma, text | shared) for text in (model.encode_text(PROMPTS), stacked))
    require_close("the velocities of stacked texts", got, want, subject.case.close)


def prompts_matter(subject: Subject) -> None:
    """Different prompts give different samples from the same noise."""
    model = subject.model
    noise = subject.noise(1)
    noise = noise.repeat(2, *[1] * (noise.ndim - 1))
    conditioning = model.encode_text(PROMPTS) | model.repeat(subject.besides(model, 1), 2)
    latents = denoise_latents(model, noise, conditioning, model.sigmas(2, subject.shape), solver="ode")
    one, other = model.decode(latents)
    difference = float((one - other).abs().max())
    require(
        difference > PROMPT_MATTERS,
        f"two prompts differ by only {difference:.1g} in pixels, less than {PROMPT_MATTERS:g}",
    )


def the_grid_ends_at_the_clean_latents(subject: Subject) -> None:
    """Following the exact velocity from noise ends at the clean latents."""
    model = subject.model
    clean, latents = subject.noise(), subject.noise().flip(0)
    grid = model.sigmas(10, subject.shape)
    for s, s_next in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        latents = latents + (s_next - s) * (latents - clean) / s
    require_close("the end of the exact trajectory", latents, clean, 1e-5)


def given_frames(subject: Subject) -> None:
    """Conditioning frames work as in diffusers, stay unchanged, and affect the other frames."""
    model, case = subject.model, subject.case
    if case.given is None:
        raise DoesNotApply("the case has no conditioning_frames_call")
    pixels, noise = subject.pixels(1), subject.noise(1)
    latents, grid = model.encode_pixels(pixels), model.sigmas(4, subject.shape)
    text = subject.told(model, PROMPTS[:1])
    for count in [n for n in model.conditional_frames if n > 0]:
        pipeline, call = case.given(subject.folder, pixels, count)
        call = model.pipeline_call(1.0, *subject.size) | {"prompt": PROMPTS[:1], "latents": noise} | call
        want = subject.drawn(pipeline, grid, **call)
        conditioning = with_conditional_frames(text, latents, torch.tensor([count]))
        got = denoise_latents(model, noise, conditioning, grid, solver="ode")
        require_close(f"the latents with {count} conditioning frames", got, want, case.close)
        require_close(f"the {count} conditioning frames", got[:, :, :count], latents[:, :, :count], case.close)
        unconditioned = denoise_latents(model, noise, text, grid, solver="ode")
        effect = float((got - unconditioned)[:, :, count:].abs().max())
        require(effect > 1e-3, f"{count} conditioning frames change the other frames by only {effect:.1g}")
