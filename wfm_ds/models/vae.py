"""One interface for all VAEs: convert pixels to normalized latents and back.

Pixels and latents are always float32, even if the VAE has another dtype. The VAE's config determines the conversion.
This module also has the size checks that several families share.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wfm_ds.pinned_memory import copy_to_device

MAX_PIXELS_PER_BATCH = 2**20
"""Maximum number of pixels that a float32 VAE processes together: one image of 1024 x 1024. A larger sample is
processed alone. The limit is fixed, so that results do not depend on the free memory."""
POSTERIOR_ATTRIBUTES = ("latent_dist", "latents", "latent")  # KL and Wan, AutoencoderTiny, AutoencoderDC


def encode_normalized(vae: Any, pixels: Tensor) -> Tensor:
    """Encode pixels in [-1, 1] to normalized latents (z - shift) * scale."""
    shift, scale = latent_shift_and_scale(vae)
    return (encode_mode(vae, pixels) - shift) * scale


def decode_normalized(vae: Any, latents: Tensor) -> Tensor:
    """Decode normalized latents to pixels, roughly in [-1, 1]."""
    shift, scale = latent_shift_and_scale(vae)
    return decode_raw(vae, latents / scale + shift)


def encode_mode(vae: Any, pixels: Tensor) -> Tensor:
    """Return the mode z of the VAE's posterior, without normalization.

    The mode is deterministic, so latents can be cached.
    """
    output = vae.encode(pixels.to(vae_dtype(vae)))
    posterior = next(getattr(output, name) for name in POSTERIOR_ATTRIBUTES if hasattr(output, name))
    z: Tensor = posterior if isinstance(posterior, Tensor) else posterior.mode()
    return z.float()


def decode_raw(vae: Any, z: Tensor) -> Tensor:
    """Decode unnormalized latents to pixels, roughly in [-1, 1]."""
    pixels: Tensor = vae.decode(z.to(vae_dtype(vae)), return_dict=False)[0]
    return pixels.float()


def vae_dtype(vae: Any) -> torch.dtype:
    dtype: torch.dtype = next(vae.parameters()).dtype
    return dtype


def max_batch_size(vae: Any, pixels: int) -> int:
    """Return the number of samples to encode or decode together. pixels: number of pixels of one sample."""
    budget = MAX_PIXELS_PER_BATCH * torch.float32.itemsize // vae_dtype(vae).itemsize
    return max(1, budget // pixels)


def frames_per_decode(vae: Any, num_frames: int) -> int:
    """Return how many pixel frames the VAE decodes together.

    The Wan VAE decodes one latent frame at a time. All other VAEs decode the whole video.
    """
    if isinstance(vae, AutoencoderKLWan):
        return min(num_frames, int(vae.config.scale_factor_temporal))
    return num_frames


def latent_shift_and_scale(vae: Any) -> tuple[Tensor | float, Tensor | float]:
    """Return (shift, scale) of the latents, as numbers or as tensors [1,C,1,1,1].

    Video VAEs have a mean and a std for each channel, in the config or in buffers (LTX-2). Image VAEs have one shift
    and one scale for all channels.
    """
    settings = dict(vae.named_buffers(recurse=False)) | vae.config
    mean, std = settings.get("latents_mean"), settings.get("latents_std")
    if mean is None or std is None:
        return float(vae.config.get("shift_factor") or 0.0), float(vae.config.scaling_factor)
    statistics = (copy_to_device(torch.as_tensor(v, dtype=torch.float32), vae.device) for v in (mean, std))
    mean, std = (v.view(1, -1, 1, 1, 1) for v in statistics)
    return mean, 1 / std


def require_image(family: str, num_frames: int) -> None:
    """Raise ValueError unless num_frames is 1."""
    if num_frames != 1:
        raise ValueError(f"{family} makes images: num_frames must be 1, got {num_frames}")


def require_multiples(height: int, width: int, multiple: int) -> None:
    """Raise ValueError unless height and width are positive multiples of `multiple`."""
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple}, got {size}")
