"""Checks of a family's inputs other than text and conditioning frames, and of text encoders that see images."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from wfm_ds.contract.case import PROMPTS, SampleInputs, denoise_latents
from wfm_ds.contract.family_under_test import (
    NO_CASE_INPUTS,
    SEEDS,
    CheckNotApplicable,
    FamilyUnderTest,
    fail_unless,
    require_close,
    require_effect,
)
from wfm_ds.contract.pixel_checks import require_value_error
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.storage.tensor_store import TensorStore
from wfm_ds.types import Conditioning

MIN_INPUT_EFFECT = 1e-3  # minimum change of velocities, which have magnitude 1
MIN_IMAGE_EFFECT = 1e-3  # minimum change of embeddings, which have magnitude 1


def check_inputs_change_velocity(subject: FamilyUnderTest) -> None:
    """Check that two samples get different velocities if they differ only in their inputs."""
    one, other = _predict_velocity(subject, _encode_identical_texts(subject) | _encode_all_inputs(subject))
    require_effect("different inputs change the velocity", one, other, MIN_INPUT_EFFECT)


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
    model, case = subject.model_with_inputs, subject.case
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
    model, case = subject.model_with_inputs, subject.case
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
        require_effect("inputs change the negative half of guidance", halves[1], without, MIN_INPUT_EFFECT)
    require_close("the two halves of guidance in one forward pass", joint, torch.cat(halves), case.tolerance)


def check_inputs_match_reference(subject: FamilyUnderTest) -> None:
    """Check that the wfm_ds sampling loop and diffusers generate the same latents from the same inputs."""
    model, case = subject.model_with_inputs, subject.case
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
    model = subject.model_with_inputs
    rows = subject.sample_inputs()
    for name in subject.list_required_inputs(model):
        without = [{key: array for key, array in row.items() if key != name} for row in rows]
        require_value_error(f"a sample without {name}", model.encode_inputs, without, subject.size[2], subject.size[:2])
    with torch.no_grad():
        velocity = model.denoise(*_call_arguments(subject))
    fail_unless(bool(velocity.isfinite().all()), "the velocity is not finite without the optional inputs")


def check_images_change_embeddings(subject: FamilyUnderTest) -> None:
    """Check that a prompt and a negative prompt have different embeddings for two samples with different images."""
    for text in _list_texts(subject):
        one, other = (_encode_alone(subject, text, sample) for sample in (0, 1))
        name = max(one, key=lambda key: one[key].ndim)  # the embedding, not its mask
        if one[name].shape == other[name].shape:
            require_effect(f"other images change the embedding of {text}", one[name], other[name], MIN_IMAGE_EFFECT)


def check_text_cache_with_images(subject: FamilyUnderTest) -> None:
    """Check that the text cache, in memory and on disk, returns the embedding of each text with its own images.

    Swapping the images of two samples must swap their embeddings.
    """
    texts = [(text, sample) for text in _list_texts(subject) for sample in (0, 1)]
    model = subject.model_with_inputs
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the second cache reads the embeddings from the disk
            cache = TextCache(model, store=TensorStore(Path(folder)))
            for order in (texts, texts[::-1]):  # the second time, the embeddings are in memory
                samples = [subject.sample_inputs()[sample] for _, sample in order]
                got = cache.encode(model.attach_images([text for text, _ in order], samples))
                rows = [_encode_alone(subject, *item) for item in order]
                want = model.stack_conditioning(rows)
                for name, tensor in want.items():
                    require_close(f"the cached {name} of texts with images", got[name], tensor, subject.case.tolerance)


def _encode_all_inputs(subject: FamilyUnderTest) -> Conditioning:
    model = subject.model_with_inputs
    inputs = _encode_rows(subject, model, subject.sample_inputs())
    unknown = sorted(inputs.keys() - model.optional_conditioning_keys)
    message = (
        f"encode_inputs returns {sorted(inputs)}, but optional_conditioning_keys is {model.optional_conditioning_keys}"
    )
    fail_unless(bool(inputs) and not unknown, message)
    return inputs


def _call_arguments(subject: FamilyUnderTest) -> tuple[Tensor, Tensor, Conditioning]:
    """Return (noise, sigma, conditioning) of two samples without optional inputs."""
    model = subject.model_with_inputs
    text = subject.encode_prompts(model, PROMPTS)
    return subject.initial_noise(), torch.tensor(subject.case.sigmas[0]), text


def _encode_identical_texts(subject: FamilyUnderTest) -> Conditioning:
    """Return the conditioning of two samples that have the same text, required inputs and conditioning frames."""
    model = subject.model_with_inputs
    text = subject.encode_prompts(model, [PROMPTS[0]] * 2)
    return {name: tensor[:1].expand_as(tensor) for name, tensor in text.items()}


def _predict_velocity(subject: FamilyUnderTest, conditioning: Conditioning) -> Tensor:
    noise = subject.initial_noise(1)
    sigma = torch.full((2,), subject.case.sigmas[0][0])
    with torch.no_grad():
        return subject.model_with_inputs.denoise(noise.repeat(2, *[1] * (noise.ndim - 1)), sigma, conditioning)


def _encode_rows(subject: FamilyUnderTest, model: DiffusionModel, rows: Sequence[SampleInputs]) -> Conditioning:
    return subject.encode_inputs(model, rows, subject.first_frames[:1] * len(rows))


def _create_generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _list_texts(subject: FamilyUnderTest) -> Sequence[str | NegativeText]:
    if not subject.model.text_inputs:
        raise CheckNotApplicable("the text encoder sees no images")
    fail_unless(subject.case.inputs is not None, NO_CASE_INPUTS)
    return PROMPTS[0], NegativeText(PROMPTS[0])


def _encode_alone(subject: FamilyUnderTest, text: str | NegativeText, sample: int) -> Conditioning:
    prompt, is_negative = (text.text, True) if isinstance(text, NegativeText) else (text, False)
    return subject.encode_texts(
        subject.model_with_inputs, [prompt], [subject.sample_inputs()[sample]], negative=is_negative
    )
