"""Checks of what comes out: latents and pixels against the stock pipeline's."""

from __future__ import annotations

import torch

from wfm_ds.contract.case import PROMPTS, denoise_latents, draw
from wfm_ds.contract.subject import DoesNotApply, Subject, require, require_close
from wfm_ds.errors import ModelError
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.recipe.sampling import SamplingRecipe

W = 4.0
PROMPT_MATTERS = 1e-3  # of pixels in [0, 1], between two prompts


def latents_without_guidance(subject: Subject) -> None:
    """Our loop draws the latents that the stock pipeline draws, two prompts at once."""
    _same_latents(subject, 1.0, None)


def latents_with_guidance(subject: Subject) -> None:
    """So it does with guidance, against the pipeline's own negative text."""
    _require_drawn_with(subject, W)
    _same_latents(subject, W, None)


def latents_with_another_embedded_guidance(subject: Subject) -> None:
    """Another embedded guidance draws the latents that the stock pipeline draws with it, unlike those of its own."""
    if subject.model.embedded_guidance is None:
        raise DoesNotApply("the network takes no guidance scale as an input")
    other = subject.fresh(embedded_guidance=2 * subject.model.embedded_guidance)
    grid = other.sigmas(5, subject.shape)
    call = subject.call(1.0) | other.pipeline_call(1.0, *subject.size)
    got = subject.sampled(other, 5)
    require_close(
        "the latents of another guidance", got, subject.drawn(subject.stock(), grid, **call), subject.case.close
    )
    most = float((got - subject.sampled(subject.model, 5)).abs().max())
    require(most > 10 * subject.case.close, f"twice the embedded guidance changes the latents by {most:.1g} only")


def _require_drawn_with(subject: Subject, w: float) -> None:
    """DoesNotApply where the family refuses this guidance."""
    height, width, frames = subject.size
    try:
        subject.model.check_sampling(SamplingRecipe(height=height, width=width, num_frames=frames, guidance_scale=w))
    except ModelError as refused:
        raise DoesNotApply(str(refused)) from refused


def latents_with_a_negative_prompt(subject: Subject) -> None:
    """So it does against a negative prompt, where the stock call takes one."""
    if not subject.case.negative_prompt:
        raise DoesNotApply("the stock call takes no negative prompt")
    _same_latents(subject, W, "a blue square")


def _same_latents(subject: Subject, w: float, negative: str | None) -> None:
    model, case = subject.model, subject.case
    grid = model.sigmas(5, subject.shape)
    call = subject.call(w, **({} if negative is None else {"negative_prompt": negative}))
    want = subject.drawn(subject.stock(), grid, **call)
    null = model.caption(model.null_text(negative), *subject.size, negative=True)
    uncond = model.encode_negative([null] * 2) | subject.besides(model) if w > 1 else None
    told = subject.told(model, PROMPTS)
    got = denoise_latents(model, subject.noise(), told, grid, solver="ode", guidance_scale=w, uncond=uncond)
    require_close(f"the latents of two prompts at a guidance of {w:g}", got, want, case.close)


def decoded_pixels(subject: Subject) -> None:
    """Decoding gives the pixels that the stock pipeline gives, in the documented layout."""
    model, case = subject.model, subject.case
    pipeline, grid = subject.stock(), model.sigmas(2, subject.shape)
    latents = subject.drawn(pipeline, grid, **subject.call(1.0))
    want = draw(pipeline, case, grid, **subject.call(1.0), output_type="pt")
    got = model.decode(latents)
    require_close("the decoded pixels", got, want, case.close)
    height, width, frames = subject.size
    layout = (2, *((frames,) if model.video else ()), height, width, 3)
    require(model.to_uint8(got).shape == layout, f"to_uint8 gives {model.to_uint8(got).shape}, not {layout}")


def several_samples_of_a_prompt(subject: Subject) -> None:
    """Rows repeated for several samples of a prompt are those of the prompt encoded as often."""
    model = subject.model
    repeated = model.repeat(model.encode_text(PROMPTS), 3)
    encoded = model.encode_text([prompt for prompt in PROMPTS for _ in range(3)])
    for what, found in (("repeat", repeated), ("encode_text", encoded)):
        keys = f"{what} gives {sorted(found)}, and conditioning_keys are {sorted(model.conditioning_keys)}"
        require(found.keys() == model.conditioning_keys, keys)
    for name in repeated:
        require(not repeated[name].requires_grad, f"encode_text keeps the gradient of {name}; use torch.no_grad")
        require_close(f"the repeated {name}", repeated[name], encoded[name], subject.case.close)


def texts_stacked(subject: Subject) -> None:
    """Texts encoded one by one and stacked give the velocities of those encoded together."""
    model = subject.model
    latents, sigma, _ = subject.one_call(model)
    besides = subject.besides(model)
    stacked = model.stack([model.encode_text([prompt]) for prompt in PROMPTS])
    with torch.no_grad():
        want, got = (model.denoise(latents, sigma, each | besides) for each in (model.encode_text(PROMPTS), stacked))
    require_close("the velocities of stacked texts", got, want, subject.case.close)


def prompts_matter(subject: Subject) -> None:
    """Another prompt makes another picture of the same noise."""
    model = subject.model
    noise = subject.noise(1)
    noise = noise.repeat(2, *[1] * (noise.ndim - 1))
    told = model.encode_text(PROMPTS) | model.repeat(subject.besides(model, 1), 2)
    latents = denoise_latents(model, noise, told, model.sigmas(2, subject.shape), solver="ode")
    one, other = model.decode(latents)
    most = float((one - other).abs().max())
    require(most > PROMPT_MATTERS, f"two prompts differ by {most:.1g} in pixels, less than {PROMPT_MATTERS:g}")


def the_grid_ends_at_the_clean_latents(subject: Subject) -> None:
    """Steps along the exact velocity of a sample, from noise, end at the sample."""
    model = subject.model
    clean, latents = subject.noise(), subject.noise().flip(0)
    grid = model.sigmas(10, subject.shape)
    for s, s_next in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        latents = latents + (s_next - s) * (latents - clean) / s
    require_close("the end of the exact field", latents, clean, 1e-5)


def given_frames(subject: Subject) -> None:
    """Given frames enter as in the stock pipeline of images or videos, stay, and are seen by the others."""
    model, case = subject.model, subject.case
    if case.given is None:
        raise DoesNotApply("the case names no stock call that is given frames")
    pixels, noise = subject.pixels(1), subject.noise(1)
    latents, grid = model.encode_pixels(pixels), model.sigmas(4, subject.shape)
    text = subject.told(model, PROMPTS[:1])
    for count in [n for n in model.conditional_frames if n > 0]:
        pipeline, call = case.given(subject.folder, pixels, count)
        call = model.pipeline_call(1.0, *subject.size) | {"prompt": PROMPTS[:1], "latents": noise} | call
        want = subject.drawn(pipeline, grid, **call)
        conditioning = with_conditional_frames(text, latents, torch.tensor([count]))
        got = denoise_latents(model, noise, conditioning, grid, solver="ode")
        require_close(f"the latents with {count} given", got, want, case.close)
        require_close(f"the {count} given latent frames", got[:, :, :count], latents[:, :, :count], case.close)
        free = denoise_latents(model, noise, text, grid, solver="ode")
        seen = float((got - free)[:, :, count:].abs().max())
        require(seen > 1e-3, f"{count} given latent frames change the others by {seen:.1g} only")
