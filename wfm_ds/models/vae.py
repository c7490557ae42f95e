"""VAEs with one interface: normalised latents out of pixels, and back, float32 whatever the VAE computes in. Their
configs say what differs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wfm_ds.pinned import on_device

PIXELS_AT_ONCE = 2**20
"""Pixels that a float32 VAE has in the works, unless one medium has more: those of a picture of 1024 x 1024. Fixed, so
that what a machine computes does not depend on the memory that happens to be free."""
POSTERIOR_ATTRIBUTES = ("latent_dist", "latents", "latent")  # KL and Wan, AutoencoderTiny, AutoencoderDC


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Latents (z - shift) * scale of pixels in [-1, 1]."""
    shift, scale = affine(vae)
    return (mode(vae, pixels) - shift) * scale


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels, roughly in [-1, 1], of normalised latents."""
    shift, scale = affine(vae)
    return decode_raw(vae, latents / scale + shift)


def mode(vae: Any, pixels: Tensor) -> Tensor:
    """The mode z of the posterior, as the VAE has it: deterministic, so that latents can be cached."""
    output = vae.encode(pixels.to(dtype_of(vae)))
    posterior = next(getattr(output, name) for name in POSTERIOR_ATTRIBUTES if hasattr(output, name))
    z: Tensor = posterior if isinstance(posterior, Tensor) else posterior.mode()
    return z.float()


def decode_raw(vae: Any, z: Tensor) -> Tensor:
    """Pixels, roughly in [-1, 1], of latents as the VAE has them."""
    pixels: Tensor = vae.decode(z.to(dtype_of(vae)), return_dict=False)[0]
    return pixels.float()


def dtype_of(vae: Any) -> torch.dtype:
    """The dtype of its weights, and so of what it computes."""
    dtype: torch.dtype = next(vae.parameters()).dtype
    return dtype


def media_at_once(vae: Any, pixels: int) -> int:
    """Number of media to encode or decode together that have this many pixels in the works each, at least 1."""
    budget = PIXELS_AT_ONCE * torch.float32.itemsize // dtype_of(vae).itemsize
    return max(1, budget // pixels)


def frames_at_once(vae: Any, num_frames: int) -> int:
    """Number of frames, of a video with this many, that the VAE decodes together: those of one latent frame where it
    decodes one latent frame after the other, else all."""
    if isinstance(vae, AutoencoderKLWan):
        return min(num_frames, int(vae.config.scale_factor_temporal))
    return num_frames


def affine(vae: Any) -> tuple[Tensor | float, Tensor | float]:
    """(shift, scale) of the latents. The VAEs of video families have a mean and a deviation for each channel, in their
    config or (LTX-2) as buffers, here [1,C,1,1,1]; the others have two numbers, and one without a shift in its config
    has 0."""
    known = dict(vae.named_buffers(recurse=False)) | vae.config
    mean, std = known.get("latents_mean"), known.get("latents_std")
    if mean is None or std is None:
        return float(vae.config.get("shift_factor") or 0.0), float(vae.config.scaling_factor)
    known_there = (on_device(torch.as_tensor(v, dtype=torch.float32), vae.device) for v in (mean, std))
    mean, std = (v.view(1, -1, 1, 1, 1) for v in known_there)
    return mean, 1 / std
