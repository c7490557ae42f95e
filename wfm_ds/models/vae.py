"""One interface for all VAEs: convert pixels to normalized latents and back, and check sizes.

Pixels and latents are always float32, even if the VAE has another dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wfm_ds.models.assets.weight_files import fingerprint_folders
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import SoundClip

MAX_PIXELS_PER_BATCH = 2**20
"""Maximum number of pixels that a float32 VAE processes together: one image of 1024 x 1024. A larger sample is
processed alone. The maximum is constant, so that results do not depend on the free memory."""
MAX_SIZE_MULTIPLE = 1024  # largest multiple of height and width to try, in pixels
# Attributes of the encoder's output that may contain the latents: KL and Wan VAEs, AutoencoderTiny, AutoencoderDC.
POSTERIOR_ATTRIBUTES = ("latent_dist", "latents", "latent")


def encode_normalized(vae: Any, pixels: Tensor) -> Tensor:
    """Encode pixels in [-1, 1] to latents z. Return the normalized latents (z - shift) * scale."""
    shift, scale = latent_shift_and_scale(vae)
    return (encode_mode(vae, pixels) - shift) * scale


def decode_normalized(vae: Any, latents: Tensor) -> Tensor:
    """Decode normalized latents to pixels, roughly in [-1, 1]."""
    shift, scale = latent_shift_and_scale(vae)
    return decode_raw(vae, latents / scale + shift)


def encode_mode(vae: Any, pixels: Tensor) -> Tensor:
    """Return the mode z of the VAE's posterior, which is deterministic, without normalization."""
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
    """Return how many samples to encode or decode together. pixels: number of pixels of one sample."""
    budget = MAX_PIXELS_PER_BATCH * torch.float32.itemsize // vae_dtype(vae).itemsize
    return max(1, budget // pixels)


def frames_per_decode(vae: Any, num_frames: int) -> int:
    """Return how many of a video's `num_frames` frames the VAE decodes at the same time."""
    if isinstance(vae, AutoencoderKLWan):
        return min(num_frames, int(vae.config.scale_factor_temporal))
    return num_frames


def latent_shift_and_scale(vae: Any) -> tuple[Tensor | float, Tensor | float]:
    """Return (shift, scale) of the VAE's latents, which are tensors [1, channels, 1, 1, 1] for video VAEs."""
    settings = dict(vae.named_buffers(recurse=False)) | vae.config
    mean, std = settings.get("latents_mean"), settings.get("latents_std")
    if mean is None or std is None:
        return float(vae.config.get("shift_factor") or 0.0), float(vae.config.scaling_factor)
    statistics = (copy_to_device(torch.as_tensor(v, dtype=torch.float32), vae.device) for v in (mean, std))
    mean, std = (v.view(1, -1, 1, 1, 1) for v in statistics)
    return mean, 1 / std


def count_patches(shape: Sequence[int], patch_size: int | Sequence[int]) -> int:
    """Return the number of patches of latents with this shape [C, ...]. patch_size: for all axes, or for each axis."""
    sizes = shape[1:]
    sides = [patch_size] * len(sizes) if isinstance(patch_size, int) else patch_size
    return math.prod(size // side for size, side in zip(sizes, sides, strict=True))


def require_multiple(name: str, size: int, multiple: int, largest: int | None = None) -> None:
    """Raise ValueError unless `size` is a positive multiple of `multiple` and at most `largest`.

    name: "height" or "width", for the error message. largest: None means no maximum.
    """
    if size < 1 or size % multiple or (largest is not None and size > largest):
        limits = "" if largest is None else f", from {multiple} to {largest}"
        raise ValueError(f"{name} must be a multiple of {multiple}{limits}, got {size}")


def require_multiples(height: int, width: int, multiple: int, largest: int | None = None) -> None:
    require_multiple("height", height, multiple, largest)
    require_multiple("width", width, multiple, largest)


def count_latent_frames(num_frames: int, factor: int, largest: int | None = None) -> int:
    """Return the number of latent frames of a video.

    factor: the VAE's temporal scale factor. largest: maximum of num_frames, None for no maximum.
    Raises ValueError unless num_frames is factor * k + 1 for an integer k >= 0.
    """
    if num_frames < 1 or (num_frames - 1) % factor or (largest is not None and num_frames > largest):
        limits = "at least 1" if largest is None else f"from 1 to {largest}"
        raise ValueError(f"num_frames must be {factor} * k + 1, {limits}, got {num_frames}")
    return (num_frames - 1) // factor + 1


class PixelCodec(ABC):
    """Base class that converts between pixels and latents with the VAE of a pipeline."""

    is_video: ClassVar[bool] = False  # pixels [B,3,F,H,W], latents [B,C,T,h,w], also for one frame
    makes_sound: ClassVar[bool] = False  # whether the samples have sound
    sound_rate: int | None = None  # samples per second of the sound that `decode_sound` returns; None: no sound
    clip_sound_rate: int | None = None  # samples per second of the sound that `encode_uint8` expects; None: no sound
    family: ClassVar[str]
    pipeline: Any
    path: Path
    device: torch.device

    @abstractmethod
    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one sample's latents: (C,h,w) for image families, (C,T,h,w) for video families.

        Raises ValueError for an unsupported size.
        """

    def image_latent_size(
        self, height: int, width: int, num_frames: int, multiple: int, largest: int | None = None
    ) -> tuple[int, int]:
        """Return (h, w), the height and width of an image's latents.

        Raises ValueError for several frames, and unless height and width are multiples of `multiple` up to `largest`.
        """
        if num_frames != 1:
            raise ValueError(f"{self.family} makes images: num_frames must be 1, got {num_frames}")
        require_multiples(height, width, multiple, largest)
        factor = self.pipeline.vae_scale_factor
        return height // factor, width // factor

    @property
    def latent_layout(self) -> tuple[str, int]:
        """The axes of a batch of latents, such as "[B,C,h,w]", and their number."""
        return ("[B,C,T,h,w]", 5) if self.is_video else ("[B,C,h,w]", 4)

    def grid_size(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (h, w), the height and width of one sample's latents of this shape."""
        return shape[-2], shape[-1]

    def num_latent_frames(self, shape: Sequence[int]) -> int:
        """Return the number of latent frames of one sample's latents of this shape: 1 for image families."""
        return shape[1] if self.is_video else 1

    def size_multiple(self, num_frames: int = 1) -> int:
        """Return the number of pixels of which height and width must be multiples."""

        def exists(size: int) -> bool:
            try:
                self.latent_shape(size, size, num_frames)
            except ValueError:
                return False
            return True

        return next(size for size in range(1, MAX_SIZE_MULTIPLE + 1) if exists(size))

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encode float32 pixels in [0, 1] to normalized float32 latents.

        Image families encode images [B,3,H,W] to latents [B,C,h,w]. Video families encode videos [B,3,F,H,W] to latents
        [B,C,T,h,w]. Raises ValueError for other shapes or dtypes.
        """
        layout, ndim = ("[B,3,F,H,W]", 5) if self.is_video else ("[B,3,H,W]", 4)
        if pixels.ndim != ndim or pixels.shape[1] != 3 or pixels.dtype != torch.float32:
            raise ValueError(f"pixels must be float32 {layout}, got {pixels.dtype} {list(pixels.shape)}")
        height, width = pixels.shape[-2:]
        self.latent_shape(height, width, pixels.shape[2] if self.is_video else 1)
        shifted = 2 * pixels.to(self.device) - 1
        parts = torch.split(shifted, self.encode_batch_size(pixels))
        return torch.cat(list(map(self.to_latents, parts)))

    def encode_batch_size(self, pixels: Tensor) -> int:
        """Return how many samples to encode together. It is 1 for videos."""
        if self.is_video:
            return 1
        height, width = pixels.shape[-2:]
        return len(pixels) if self.device.type == "cpu" else max_batch_size(self.pipeline.vae, height * width)

    def encode_uint8(self, media: Sequence[npt.NDArray[np.uint8] | SoundClip]) -> Tensor:
        """Encode uint8 images [H,W,3] or videos [F,H,W,3]. All arrays must have the same shape.

        Video families treat an image as a video with one frame. Families with a `clip_sound_rate` encode SoundClips.
        """
        arrays = [m.frames if isinstance(m, SoundClip) else m for m in media]
        videos = [torch.from_numpy(m if m.ndim == 4 else m[None]) for m in arrays]
        frames = copy_to_device(torch.stack(videos), self.device)
        pixels = frames.permute(0, 4, 1, 2, 3).float() / 255
        return self.encode_pixels(pixels if self.is_video else pixels.squeeze(2))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decode normalized latents to float32 pixels in [0, 1], in the shape that `encode_pixels` accepts."""
        return (self.to_pixels(latents.to(self.device)) / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def decode_sound(self, latents: Tensor) -> Tensor | None:
        """Decode latents to sound, float32 [B, channels, samples] in [-1, 1]. None: the model has no sound."""
        return None

    def to_latents(self, pixels: Tensor) -> Tensor:
        """Encode float32 pixels in [-1, 1] on the model's device to normalized float32 latents."""
        return encode_normalized(self.pipeline.vae, pixels)

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Decode normalized float32 latents on the model's device to float32 pixels, roughly in [-1, 1]."""
        return decode_normalized(self.pipeline.vae, latents)

    @staticmethod
    def quantize_pixels(pixels: Tensor) -> Tensor:
        """Round pixels in [0, 1] to uint8 values 0 to 255."""
        return (255 * pixels.clamp(0, 1)).round().to(torch.uint8)

    @staticmethod
    def to_uint8(pixels: Tensor) -> npt.NDArray[np.uint8]:
        """Convert pixels in [0, 1] from [B,3,H,W] to uint8 [B,H,W,3], or from [B,3,F,H,W] to [B,F,H,W,3]."""
        return np.ascontiguousarray(PixelCodec.quantize_pixels(pixels).cpu().movedim(1, -1).numpy())

    def latent_cache_key(self) -> dict[str, Any]:
        """Return everything that latents from encode_pixels depend on, except the pixels, as JSON values."""
        dtype = str(next(self.pipeline.vae.parameters()).dtype)
        return {"family": self.family, "parts": fingerprint_folders(self.path, ["vae"]), "dtype": dtype}
