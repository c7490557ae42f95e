"""Conditioning of Wan's image-to-video networks on a first frame: extra input channels, and in 2.1 CLIP embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from wfm_ds.models import vae
from wfm_ds.pinned import on_device

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

CHANNELS, EMBEDS = "image_channels", "image_embeds"
KEPT_BYTES = 2**30  # on the host: 120 videos of 81 frames of 480 x 832


class ImageConditions:
    """Encodes first frames one at a time, with an LRU cache, because a run needs each at every noise level."""

    def __init__(self, pipeline: Any, *, embeds: bool, kept_bytes: int = KEPT_BYTES) -> None:
        """embeds: whether the network takes CLIP embeddings too. max_cache_bytes: limit of the cache."""
        self.pipeline, self.embeds, self._free = pipeline, embeds, kept_bytes
        self._kept: OrderedDict[tuple[bytes, int], Conditioning] = OrderedDict()

    @property
    def keys(self) -> tuple[str, ...]:
        """The conditioning keys that `encode_frames` returns."""
        return (CHANNELS, EMBEDS) if self.embeds else (CHANNELS,)

    def of(self, frames: Sequence[npt.NDArray[np.uint8]], num_frames: int, device: torch.device) -> Conditioning:
        """Encode the first frames [H,W,3] of videos with num_frames.

        image_channels [B,f+C,T,h,w] float32: f mask channels (f is the VAE's temporal factor), 1 on the first latent
        frame, then the normalized latents of the frame followed by grey frames. image_embeds [B,n,D] in CLIP's dtype,
        if the network takes them.
        """
        rows = [self._of(frame, num_frames) for frame in frames]
        return {name: on_device(torch.cat([row[name] for row in rows]), device) for name in rows[0]}

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `encode_frames` for latents [C,T,h,w], without the batch axis."""
        channels, *grid = shape
        shapes = {CHANNELS: (self.pipeline.vae_scale_factor_temporal + channels, *grid)}
        if not self.embeds:
            return shapes
        clip = self.pipeline.image_encoder.config
        return {**shapes, EMBEDS: ((clip.image_size // clip.patch_size) ** 2 + 1, clip.hidden_size)}

    def _of(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        key = blake2b(repr(frame.shape).encode() + frame.tobytes()).digest(), num_frames
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        conditioning = self._encoded(frame, num_frames)
        self._kept[key] = conditioning
        self._free -= num_bytes(conditioning)
        while self._free < 0 and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._free += num_bytes(oldest)
        return conditioning

    @torch.no_grad()
    def _encoded(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        """Return one row on the host, equal to the pipeline's prepare_latents and encode_image."""
        device = self.pipeline.vae.device
        pixels = on_device(torch.from_numpy(frame), device).permute(2, 0, 1).float() / 255
        clip = pixels.new_zeros(1, 3, num_frames, *pixels.shape[1:])  # grey (0) after the first frame
        clip[0, :, 0] = 2 * pixels - 1
        latents = vae.encode(self.pipeline.vae, clip)
        mask = latents.new_zeros(1, self.pipeline.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        conditioning = {CHANNELS: torch.cat([mask, latents], dim=1).cpu()}
        if self.embeds:
            embeds: Tensor = self.pipeline.encode_image(Image.fromarray(frame), device)
            conditioning[EMBEDS] = embeds.cpu()
        return conditioning


def num_bytes(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.values())
