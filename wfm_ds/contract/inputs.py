"""Checks of inputs in addition to text and conditioning frames: `input_specs` and `encode_inputs` of a family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.contract.case import PROMPTS, denoise_latents
from wfm_ds.contract.pixels import refused
from wfm_ds.contract.subject import NO_INPUTS, SEEDS, DoesNotApply, Subject, require, require_close
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.sampling.noise import seeded_normal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wfm_ds.contract.case import Inputs
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.types import Conditioning

MATTERS = 1e-3  # minimum change of velocities, which have magnitude 1


def inputs_change_the_velocity(subject: Subject) -> None:
    """Two samples that only differ in their inputs have different velocities."""
    one, other = _velocity(subject, _alike(subject) | _told(subject))
    difference = float((one - other).abs().max())
    require(difference > MATTERS, f"other inputs change the velocity by only {difference:.1g}")


def swapped_inputs_swap_the_velocities(subject: Subject) -> None:
    """Swapping the inputs of two samples swaps their velocities."""
    text, inputs = _alike(subject), _told(subject)
    swapped = {name: tensor.flip(0) for name, tensor in inputs.items()}
    want = _velocity(subject, text | inputs).flip(0)
    require_close("velocities after swapping the inputs", _velocity(subject, text | swapped), want, subject.case.close)


def a_batch_of_inputs_is_its_samples(subject: Subject) -> None:
    """A batch of two samples with different prompts, noise and inputs equals the single samples."""
    model, case = _model(subject), subject.case
    latents, sigma, text = _one_call(subject)
    inputs = _told(subject)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, text | inputs)
        for i, row in enumerate(subject.inputs()):
            one = _encoded(subject, model, [row])
            require(one.keys() == inputs.keys(), f"one sample has keys {sorted(one)}, two have {sorted(inputs)}")
            conditioning = {name: rows[i : i + 1] for name, rows in text.items()} | one
            single = model.denoise(latents[i : i + 1], sigma[i : i + 1], conditioning)
            require_close(f"sample {i} of a batch with inputs", batch[i : i + 1], single, case.close)


def both_halves_of_guidance_are_told(subject: Subject) -> None:
    """The negative half of guidance uses the inputs too, in separate and in joint forward passes."""
    model, case = _model(subject), subject.case
    latents, sigma, text = _one_call(subject)
    negative_text = model.caption(model.null_text(), *subject.size, negative=True)
    negative, inputs = model.encode_negative([negative_text] * 2) | subject.besides(model), _told(subject)
    with torch.no_grad():
        halves = [model.denoise(latents, sigma, half | inputs) for half in (text, negative)]
        without = model.denoise(latents, sigma, negative) if not _required(model) else None
        both = model.stack([text | inputs, negative | inputs])
        joint = model.denoise(torch.cat([latents] * 2), torch.cat([sigma] * 2), both)
    if without is not None:
        difference = float((halves[1] - without).abs().max())
        require(difference > MATTERS, f"inputs change the negative half of guidance by only {difference:.1g}")
    require_close("the two halves of guidance in one forward pass", joint, torch.cat(halves), case.close)


def inputs_as_the_stock_pipeline(subject: Subject) -> None:
    """Our loop generates the same latents from inputs as diffusers."""
    model, case = _model(subject), subject.case
    reference = case.stock_inputs
    if reference is None:
        raise DoesNotApply("the case has no reference_inputs")
    height, width, frames = reference.size
    shape = model.latent_shape(*reference.size)
    pixels = torch.rand(1, 3, *((frames,) if model.video else ()), height, width, generator=_generator(5))
    pipeline, row, call = reference.call(subject.folder, pixels)
    grid = model.sigmas(3, shape)
    call = {"prompt": PROMPTS[:1], "generator": [_generator(SEEDS[0])]} | call
    want = subject.drawn(pipeline, grid, **call)
    conditioning = model.encode_text([model.caption(PROMPTS[0], *reference.size)])
    conditioning |= model.encode_inputs([row], frames, (height, width))
    if reference.conditional_frames:
        latents = model.encode_pixels(pixels)
        conditioning = with_conditional_frames(conditioning, latents, torch.tensor([reference.conditional_frames]))
    got = denoise_latents(model, seeded_normal(SEEDS[:1], shape), conditioning, grid, solver="ode")
    require_close("the latents of a sample with inputs", got, want, case.close)


def inputs_that_are_missing(subject: Subject) -> None:
    """Optional inputs may be omitted, and omitting required inputs raises ValueError."""
    model = _model(subject)
    rows, required = subject.inputs(), _required(model)
    for name in required:
        without = [{key: array for key, array in row.items() if key != name} for row in rows]
        refused(f"a sample without {name}", model.encode_inputs, without, subject.size[2], subject.size[:2], says=name)
    needed = [{name: array for name, array in row.items() if name in required} for row in rows]
    inputs = _encoded(subject, model, needed)
    latents, sigma, text = _one_call(subject)
    with torch.no_grad():
        velocity = model.denoise(latents, sigma, text | inputs)
    require(bool(velocity.isfinite().all()), "the velocity is not finite without the optional inputs")


def _model(subject: Subject) -> DiffusionModel:
    """Load the model with all inputs of the case. Raises CheckNotApplicable for a family without inputs."""
    if not subject.model.takes:
        raise DoesNotApply("the family has no inputs")
    require(subject.case.inputs is not None, NO_INPUTS)
    names = {name for row in subject.inputs() for name in row}
    unknown = sorted(names - subject.model.takes.keys())
    require(not unknown, f"the case has inputs {unknown}, but input_specs has {sorted(subject.model.takes)}")
    return subject.told_model


def _required(model: DiffusionModel) -> list[str]:
    return [name for name, spec in model.takes.items() if spec.required]


def _told(subject: Subject) -> Conditioning:
    """Encode the inputs of two samples and check the keys."""
    model = _model(subject)
    inputs = _encoded(subject, model, subject.inputs())
    unknown = sorted(inputs.keys() - model.optional_keys)
    message = f"encode_inputs returns {sorted(inputs)}, but optional_conditioning_keys is {model.optional_keys}"
    require(bool(inputs) and not unknown, message)
    return inputs


def _one_call(subject: Subject) -> tuple[Tensor, Tensor, Conditioning]:
    """Return noise, sigma and text conditioning of two different samples, with required conditioning frames."""
    model = _model(subject)
    text = subject.told(model, PROMPTS)
    return subject.noise(), torch.tensor(subject.case.sigmas[0]), text


def _alike(subject: Subject) -> Conditioning:
    """Return identical text and conditioning frames for two samples."""
    model = _model(subject)
    text = subject.told(model, [PROMPTS[0]] * 2)
    return {name: tensor[:1].expand_as(tensor) for name, tensor in text.items()}


def _velocity(subject: Subject, conditioning: Conditioning) -> Tensor:
    """Predict velocities of two samples with the same noise and sigma."""
    noise = subject.noise(1)
    sigma = torch.full((2,), subject.case.sigmas[0][0])
    with torch.no_grad():
        return _model(subject).denoise(noise.repeat(2, *[1] * (noise.ndim - 1)), sigma, conditioning)


def _encoded(subject: Subject, model: DiffusionModel, rows: Sequence[Inputs]) -> Conditioning:
    """Encode the inputs of samples with the same first frame."""
    return subject.encoded(model, rows, subject.pictures[:1] * len(rows))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
