"""Checks of what samples are told besides text and given frames: `takes` and `encode_inputs` of a family."""

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

MATTERS = 1e-3  # of velocities, whose size is about 1


def inputs_change_the_velocity(subject: Subject) -> None:
    """Two samples that differ in their inputs alone have unlike velocities."""
    one, other = _velocity(subject, _alike(subject) | _told(subject))
    most = float((one - other).abs().max())
    require(most > MATTERS, f"other inputs change the velocity by {most:.1g} only")


def swapped_inputs_swap_the_velocities(subject: Subject) -> None:
    """Each sample of a batch is told its own inputs."""
    text, told = _alike(subject), _told(subject)
    swapped = {name: tensor.flip(0) for name, tensor in told.items()}
    want = _velocity(subject, text | told).flip(0)
    require_close("velocities after a swap of the inputs", _velocity(subject, text | swapped), want, subject.case.close)


def a_batch_of_inputs_is_its_samples(subject: Subject) -> None:
    """Two samples of unlike prompts, noise and inputs have the velocities of each alone."""
    model, case = _model(subject), subject.case
    latents, sigma, text = _one_call(subject)
    told = _told(subject)
    with torch.no_grad():
        batch = model.denoise(latents, sigma, text | told)
        for i, row in enumerate(subject.inputs()):
            one = _encoded(subject, model, [row])
            require(one.keys() == told.keys(), f"of one sample there is {sorted(one)}, of two {sorted(told)}")
            conditioning = {name: rows[i : i + 1] for name, rows in text.items()} | one
            alone = model.denoise(latents[i : i + 1], sigma[i : i + 1], conditioning)
            require_close(f"sample {i} of a batch with inputs", batch[i : i + 1], alone, case.close)


def both_halves_of_guidance_are_told(subject: Subject) -> None:
    """The half that guidance contrasts with is told the inputs too, in a forward of its own or in a joint one."""
    model, case = _model(subject), subject.case
    latents, sigma, text = _one_call(subject)
    null = model.caption(model.null_text(), *subject.size, negative=True)
    contrast, told = model.encode_negative([null] * 2) | subject.besides(model), _told(subject)
    with torch.no_grad():
        halves = [model.denoise(latents, sigma, half | told) for half in (text, contrast)]
        untold = model.denoise(latents, sigma, contrast) if not _required(model) else None
        both = model.stack([text | told, contrast | told])
        joint = model.denoise(torch.cat([latents] * 2), torch.cat([sigma] * 2), both)
    if untold is not None:
        most = float((halves[1] - untold).abs().max())
        require(most > MATTERS, f"inputs change what guidance contrasts with by {most:.1g} only")
    require_close("the two halves of guidance in one forward", joint, torch.cat(halves), case.close)


def inputs_as_the_stock_pipeline(subject: Subject) -> None:
    """Our loop draws of a sample's inputs what the stock pipeline draws of them."""
    model, case = _model(subject), subject.case
    stock = case.stock_inputs
    if stock is None:
        raise DoesNotApply("the case names no stock call that takes inputs")
    height, width, frames = stock.size
    shape = model.latent_shape(*stock.size)
    pixels = torch.rand(1, 3, *((frames,) if model.video else ()), height, width, generator=_generator(5))
    pipeline, row, call = stock.call(subject.folder, pixels)
    grid = model.sigmas(3, shape)
    call = {"prompt": PROMPTS[:1], "generator": [_generator(SEEDS[0])]} | call
    want = subject.drawn(pipeline, grid, **call)
    conditioning = model.encode_text([model.caption(PROMPTS[0], *stock.size)])
    conditioning |= model.encode_inputs([row], frames, (height, width))
    if stock.conditional_frames:
        latents = model.encode_pixels(pixels)
        conditioning = with_conditional_frames(conditioning, latents, torch.tensor([stock.conditional_frames]))
    got = denoise_latents(model, seeded_normal(SEEDS[:1], shape), conditioning, grid, solver="ode")
    require_close("the latents of a sample with inputs", got, want, case.close)


def inputs_that_are_missing(subject: Subject) -> None:
    """Inputs that are not required may be left out, and without those that are there is a ValueError."""
    model = _model(subject)
    rows, required = subject.inputs(), _required(model)
    for name in required:
        without = [{key: array for key, array in row.items() if key != name} for row in rows]
        refused(f"a sample without {name}", model.encode_inputs, without, subject.size[2], subject.size[:2], says=name)
    needed = [{name: array for name, array in row.items() if name in required} for row in rows]
    told = _encoded(subject, model, needed)
    latents, sigma, text = _one_call(subject)
    with torch.no_grad():
        velocity = model.denoise(latents, sigma, text | told)
    require(bool(velocity.isfinite().all()), "without the inputs that may be left out the velocity is not finite")


def _model(subject: Subject) -> DiffusionModel:
    """A model that is told all inputs of the case. Raises DoesNotApply for a family without any."""
    if not subject.model.takes:
        raise DoesNotApply("the family takes no inputs")
    require(subject.case.inputs is not None, NO_INPUTS)
    named = {name for row in subject.inputs() for name in row}
    unknown = sorted(named - subject.model.takes.keys())
    require(not unknown, f"the case's inputs name {unknown}, and `takes` {sorted(subject.model.takes)}")
    return subject.told_model


def _required(model: DiffusionModel) -> list[str]:
    return [name for name, taken in model.takes.items() if taken.required]


def _told(subject: Subject) -> Conditioning:
    """Conditioning of the inputs of two samples, under keys that the family states."""
    model = _model(subject)
    told = _encoded(subject, model, subject.inputs())
    strange = sorted(told.keys() - model.optional_keys)
    require(bool(told) and not strange, f"encode_inputs gives {sorted(told)}, of optional_keys {model.optional_keys}")
    return told


def _one_call(subject: Subject) -> tuple[Tensor, Tensor, Conditioning]:
    """Noise, sigma and text of two unlike samples, with the frames that they must be given."""
    model = _model(subject)
    text = subject.told(model, PROMPTS)
    return subject.noise(), torch.tensor(subject.case.sigmas[0]), text


def _alike(subject: Subject) -> Conditioning:
    """Text and given frames of two samples that are alike."""
    model = _model(subject)
    text = subject.told(model, [PROMPTS[0]] * 2)
    return {name: tensor[:1].expand_as(tensor) for name, tensor in text.items()}


def _velocity(subject: Subject, conditioning: Conditioning) -> Tensor:
    """Velocities of two samples of the same noise at the same sigma."""
    noise = subject.noise(1)
    sigma = torch.full((2,), subject.case.sigmas[0][0])
    with torch.no_grad():
        return _model(subject).denoise(noise.repeat(2, *[1] * (noise.ndim - 1)), sigma, conditioning)


def _encoded(subject: Subject, model: DiffusionModel, rows: Sequence[Inputs]) -> Conditioning:
    """Conditioning of the inputs of samples that begin alike."""
    return subject.encoded(model, rows, subject.pictures[:1] * len(rows))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
