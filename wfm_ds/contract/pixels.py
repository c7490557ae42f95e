"""Checks of sizes, of pixels on their way to latents, and of the precision of the parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wfm_ds.contract.subject import Broken, Subject, require, require_close

MOST_BF16 = {"denoiser": 2e-2, "vae": 5e-2}  # relative to the norm, as far as bfloat16 may be from float32


def refused(what: str, call: Callable[..., Any], *arguments: Any, says: str) -> None:
    """Raise Broken unless the call raises a ValueError whose sentence has these words."""
    try:
        call(*arguments)
    except ValueError as error:
        require(says in str(error), f"{what} is refused without the words {says!r}: {error}")
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise Broken(
            f"{what} ends in {type(error).__name__} ({error}); check it before, and raise a ValueError"
        ) from error
    else:
        raise Broken(f"{what} is not refused; raise a ValueError")


def sizes_are_multiples(subject: Subject) -> None:
    """Heights and widths are the multiples of one number, and others are refused with it."""
    model, frames = subject.model, subject.size[2]
    multiple = model.size_multiple(frames)
    for size in range(1, 2 * multiple + 2):
        for height, width in ((size, multiple), (multiple, size)):
            if size % multiple == 0:
                model.latent_shape(height, width, frames)
            else:
                arguments = (height, width, frames)
                refused(
                    f"the size {arguments}", model.latent_shape, *arguments, says=f"must be a multiple of {multiple}"
                )


def shapes_agree(subject: Subject) -> None:
    """Latents of pixels have the shape of latent_shape, float32, and decode to pixels of the same size."""
    model, (height, width, frames) = subject.model, subject.size
    pixels = subject.pixels()
    latents = model.encode_pixels(pixels)
    require(latents.shape == (2, *subject.shape), f"latents {list(latents.shape)}, not {[2, *subject.shape]}")
    require(latents.dtype == torch.float32, f"latents are {latents.dtype}, not float32")
    decoded = model.decode(latents).shape
    require(decoded == pixels.shape, f"pixels {list(pixels.shape)} come back as {list(decoded)}")
    for wrong in ((height + 1, width, frames), (height, 0, frames), (height, width, frames + 1)):
        refused(f"the size {wrong}", model.latent_shape, *wrong, says="must be")


def encoding_is_the_inverse_of_decoding(subject: Subject) -> None:
    """Not the pixels themselves, which a random VAE loses: the normalisations of decoding and encoding cancel."""
    model, vae = subject.model, subject.model.pipeline.vae
    pixels = subject.pixels()
    shown = 2 * (pixels[:, :, None] if subject.case.frame_axis else pixels) - 1
    with torch.no_grad():
        raw = vae.encode(shown)
        z = raw.latent_dist.mode() if hasattr(raw, "latent_dist") else raw[0]
        decoded: Tensor = vae.decode(z, return_dict=False)[0]
    want = ((decoded[:, :, 0] if subject.case.frame_axis else decoded) / 2 + 0.5).clamp(0, 1)
    require_close(
        "pixels that were encoded and decoded", model.decode(model.encode_pixels(pixels)), want, subject.case.close
    )


def bfloat16_denoiser(subject: Subject) -> None:
    """In bfloat16 the velocity is float32 and near; what the network wants in float32 stays, and so do other parts."""
    low = subject.fresh(torch.bfloat16)
    kept = low.pipeline.transformer._keep_in_fp32_modules or []
    for name, parameter in low.denoiser.named_parameters():
        expected = torch.float32 if any(part in name.split(".") for part in kept) else torch.bfloat16
        require(parameter.dtype == expected, f"{name} is {parameter.dtype}, not {expected}")
    # A text encoder that is stored with the denoiser is loaded with it.
    together = list(low.text_parts().values()) if {*low.text_folders()} & {*low.denoiser_parts} else []
    others = {p.dtype for part in low.frozen_parts() if part not in together for p in part.parameters()}
    require(others == {torch.float32}, f"parts beside the denoiser are {others}, not float32 alone")
    arguments = subject.one_call(low)
    with torch.no_grad():
        want, got = subject.model.denoise(*arguments), low.denoise(*arguments)
    _near("the velocity of a bfloat16 denoiser", got, want, MOST_BF16["denoiser"])


def bfloat16_vae(subject: Subject) -> None:
    """A bfloat16 VAE takes and gives float32, near that of float32, and its latents are cached apart."""
    model, low = subject.model, subject.fresh(vae_dtype=torch.bfloat16)
    pixels = subject.pixels()
    latents = model.encode_pixels(pixels)
    _near("the latents of a bfloat16 VAE", low.encode_pixels(pixels), latents, MOST_BF16["vae"])
    _near("the pixels of a bfloat16 VAE", low.decode(latents), model.decode(latents), MOST_BF16["vae"])
    require({p.dtype for p in low.pipeline.vae.parameters()} == {torch.bfloat16}, "the VAE is not bfloat16 alone")
    parts = [part for part in low.frozen_parts() if part is not low.pipeline.vae]
    dtypes = {p.dtype for part in [*parts, low.denoiser] for p in part.parameters()}
    require(dtypes == {torch.float32}, f"parts beside the VAE are {dtypes}, not float32 alone")
    require(low.latent_identity() != model.latent_identity(), "latent_identity does not tell the VAE's precision")
    require(low.text_identity() == model.text_identity(), "text_identity depends on the VAE")


def _near(what: str, got: Tensor, want: Tensor, most: float) -> None:
    require(got.dtype == torch.float32, f"{what} is {got.dtype}, not float32")
    distance = float((got - want).norm() / want.norm())
    require(
        0 < distance < most, f"{what} is {distance:.2g} away, relative to the norm; between 0 and {most:g} is right"
    )
