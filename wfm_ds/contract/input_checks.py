"""Checks of a family's inputs other than text and conditioning frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.contract.case import PROMPTS, denoise_latents
from wfm_ds.contract.family_under_test import (
    LARGER_WEIGHTS,
    NO_CASE_INPUTS,
    SEEDS,
    CheckNotApplicable,
    FamilyUnderTest,
    fail_unless,
    require_close,
)
from wfm_ds.contract.pixel_checks import require_value_error
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.sampling.latents import draw_cpu_normal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wfm_ds.contract.case import SampleInputs
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.types import Conditioning

MIN_INPUT_EFFECT = 1e-3  # minimum change of velocities, which have magnitude 1


def check_inputs_change_velocity(subject: FamilyUnderTest) -> None:
    """Check that two samples get different velocities if they differ only in their inputs."""
    one, other = _predict_velocity(subject, _encode_identical_texts(subject) | _encode_all_inputs(subject))
    difference = float((one - other).abs().max())
    fail_unless(
        difference > MIN_INPUT_EFFECT,
        f"different inputs change the velocity by only {difference:.1g}; {LARGER_WEIGHTS}",
    )


def check_swapped_inputs(subject: FamilyUnderTest) -> None:
    """Check that swapping the inputs of two otherwise identical samples swaps their velocities."""
    text, inputs = _encode_identical_texts(subject), _encode_all_inputs(subject)
    swapped = {name: tensor.flip(0) for name, tensor in inputs.items()}
    want = _predict_velocity(subject, text | inputs).flip(0)
    require_close(
        "velocities after swapping the inputs", _predict_velocity(subject, text | swapped), want, subject.case.tolerance
    )


def check_batch_with_inputs(subject: FamilyUnderTest) -> None:
    """Check that denoising two samples with different inputs in one batch equals denoising each sample alone."""
    model, case = _load_model(subject), subject.case
    latents, sigma, text = _call_arguments(subject)
    inputs = _encode_all_inputs(subject)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, text | inputs)
        for i, row in enumerate(subject.sample_inputs()):
            one = _encode_rows(subject, model, [row])
            fail_unless(one.keys() == inputs.keys(), f"one sample has keys {sorted(one)}, two have {sorted(inputs)}")
            conditioning = {name: rows[i : i + 1] for name, rows in text.items()} | one
            single = model.denoise(latents[i : i + 1], sigma[i : i + 1], conditioning)
            require_close(f"sample {i} of a batch with inputs", batch[i : i + 1], single, case.tolerance)


def check_inputs_in_both_guidance_halves(subject: FamilyUnderTest) -> None:
    """Check that the inputs change the unconditional prediction.

    One forward pass for conditional and unconditional prediction must give the same velocities as two passes.
    """
    model, case = _load_model(subject), subject.case
    latents, sigma, text = _call_arguments(subject)
    negative, inputs = subject.encode_negative_prompt(model), _encode_all_inputs(subject)
    with torch.no_grad():
        halves = [model.denoise(latents, sigma, half | inputs) for half in (text, negative)]
        optional = model.optional_conditioning_keys
        required = {name: tensor for name, tensor in negative.items() if name not in optional}
        is_optional = not any(spec.required for spec in model.input_specs.values())
        without = model.denoise(latents, sigma, required) if is_optional else None
        both = model.stack_conditioning([text | inputs, negative | inputs])
        joint = model.denoise(torch.cat([latents] * 2), torch.cat([sigma] * 2), both)
    if without is not None:
        difference = float((halves[1] - without).abs().max())
        fail_unless(
            difference > MIN_INPUT_EFFECT,
            f"inputs change the negative half of guidance by only {difference:.1g}; {LARGER_WEIGHTS}",
        )
    require_close("the two halves of guidance in one forward pass", joint, torch.cat(halves), case.tolerance)


def check_inputs_match_reference(subject: FamilyUnderTest) -> None:
    """Check that the wfm_ds sampling loop and diffusers generate the same latents from the same inputs."""
    model, case = _load_model(subject), subject.case
    reference = case.reference_inputs
    if reference is None:
        raise CheckNotApplicable("the case has no reference_inputs")
    height, width, frames = reference.size
    shape = model.latent_shape(*reference.size)
    pixels = torch.rand(1, 3, *((frames,) if model.is_video else ()), height, width, generator=_create_generator(5))
    pipeline, row, call = reference.call(subject.folder, pixels)
    grid = model.sigmas(3, shape)
    call = {"prompt": PROMPTS[:1], "generator": [_create_generator(SEEDS[0])]} | call
    want = subject.reference_latents(pipeline, grid, **call)
    conditioning = subject.encode_texts(model, [model.format_prompt(PROMPTS[0], *reference.size)], [row])
    conditioning |= model.encode_inputs([row], frames, (height, width))
    if reference.num_conditioning_frames:
        latents = model.encode_pixels(pixels)
        conditioning = add_clean_frames(conditioning, latents, torch.tensor([reference.num_conditioning_frames]))
    got = denoise_latents(model, draw_cpu_normal(SEEDS[:1], shape), conditioning, grid, solver="ode")
    require_close("the latents of a sample with inputs", got, want, case.tolerance)


def check_missing_inputs(subject: FamilyUnderTest) -> None:
    """Check that a sample without optional inputs is accepted, and that a missing required input raises ValueError."""
    model = _load_model(subject)
    rows = subject.sample_inputs()
    for name in subject.list_required_inputs(model):
        without = [{key: array for key, array in row.items() if key != name} for row in rows]
        require_value_error(f"a sample without {name}", model.encode_inputs, without, subject.size[2], subject.size[:2])
    with torch.no_grad():
        velocity = model.denoise(*_call_arguments(subject))
    fail_unless(bool(velocity.isfinite().all()), "the velocity is not finite without the optional inputs")


def _load_model(subject: FamilyUnderTest) -> DiffusionModel:
    """Load the model with all inputs of the case. Raises CheckNotApplicable if the family has no input_specs."""
    if not subject.model.input_specs:
        raise CheckNotApplicable("the family has no inputs")
    fail_unless(subject.case.inputs is not None, NO_CASE_INPUTS)
    names = {name for row in subject.sample_inputs() for name in row}
    unknown = sorted(names - subject.model.input_specs.keys())
    fail_unless(not unknown, f"the case has inputs {unknown}, but input_specs has {sorted(subject.model.input_specs)}")
    return subject.model_with_inputs


def _encode_all_inputs(subject: FamilyUnderTest) -> Conditioning:
    model = _load_model(subject)
    inputs = _encode_rows(subject, model, subject.sample_inputs())
    unknown = sorted(inputs.keys() - model.optional_conditioning_keys)
    message = (
        f"encode_inputs returns {sorted(inputs)}, but optional_conditioning_keys is {model.optional_conditioning_keys}"
    )
    fail_unless(bool(inputs) and not unknown, message)
    return inputs


def _call_arguments(subject: FamilyUnderTest) -> tuple[Tensor, Tensor, Conditioning]:
    """Return (noise, sigma, conditioning) of two samples without optional inputs."""
    model = _load_model(subject)
    text = subject.encode_prompts(model, PROMPTS)
    return subject.initial_noise(), torch.tensor(subject.case.sigmas[0]), text


def _encode_identical_texts(subject: FamilyUnderTest) -> Conditioning:
    """Return the conditioning of two samples that have the same text, required inputs and conditioning frames."""
    model = _load_model(subject)
    text = subject.encode_prompts(model, [PROMPTS[0]] * 2)
    return {name: tensor[:1].expand_as(tensor) for name, tensor in text.items()}


def _predict_velocity(subject: FamilyUnderTest, conditioning: Conditioning) -> Tensor:
    noise = subject.initial_noise(1)
    sigma = torch.full((2,), subject.case.sigmas[0][0])
    with torch.no_grad():
        return _load_model(subject).denoise(noise.repeat(2, *[1] * (noise.ndim - 1)), sigma, conditioning)


def _encode_rows(subject: FamilyUnderTest, model: DiffusionModel, rows: Sequence[SampleInputs]) -> Conditioning:
    return subject.encode_inputs(model, rows, subject.first_frames[:1] * len(rows))


def _create_generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
