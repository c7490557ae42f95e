"""Conditioning of Wan's image-to-video networks on a first frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from wfm_ds.models import vae
from wfm_ds.models.source_images import MAX_CACHE_BYTES, ImageCache
from wfm_ds.pinned_memory import copy_to_device

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

CHANNELS_KEY, EMBEDS_KEY = "image_channels", "image_embeds"


class ImageConditioner:
    """Encodes first frames for image-to-video networks. Results are cached in host memory."""

    def __init__(self, pipeline: Any, *, embeds: bool, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        """embeds: whether the network also receives CLIP image embeddings."""
        self.pipeline, self.embeds, self._cache = pipeline, embeds, ImageCache(max_cache_bytes)

    @property
    def keys(self) -> tuple[str, ...]:
        return (CHANNELS_KEY, EMBEDS_KEY) if self.embeds else (CHANNELS_KEY,)

    def encode_frames(
        self, frames: Sequence[npt.NDArray[np.uint8]], num_frames: int, device: torch.device
    ) -> Conditioning:
        """Encode the first frames [H,W,3] of videos with num_frames frames.

        Returns {image_channels: float32 [batch, channels, latent frames, h, w]}. The first channels, as many as the
        VAE's temporal scale factor, are a mask that is 1 on the first latent frame. The remaining channels are the
        normalized latents of a video with grey frames after the first frame.
        If the network receives CLIP embeddings, the result also contains image_embeds: [batch, tokens, channels] in
        CLIP's dtype.
        """
        rows = [
            self._cache.encode([frame], num_frames, partial(self._encode_frame, frame, num_frames)) for frame in frames
        ]
        return {name: copy_to_device(torch.cat([row[name] for row in rows]), device) for name in rows[0]}

    def conditioning_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return {name: shape without batch axis} of the tensors from `encode_frames`.

        shape: shape [C,T,h,w] of the latents of one video.
        """
        channels, *grid = shape
        shapes = {CHANNELS_KEY: (self.pipeline.vae_scale_factor_temporal + channels, *grid)}
        if not self.embeds:
            return shapes
        clip = self.pipeline.image_encoder.config
        return {**shapes, EMBEDS_KEY: ((clip.image_size // clip.patch_size) ** 2 + 1, clip.hidden_size)}

    @torch.no_grad()
    def _encode_frame(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        """Encode one frame as the pipeline does."""
        device = self.pipeline.vae.device
        pixels = copy_to_device(torch.from_numpy(frame), device).permute(2, 0, 1).float() / 255
        clip = pixels.new_zeros(1, 3, num_frames, *pixels.shape[1:])  # grey (0) after the first frame
        clip[0, :, 0] = 2 * pixels - 1
        latents = vae.encode_normalized(self.pipeline.vae, clip)
        mask = latents.new_zeros(1, self.pipeline.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        conditioning = {CHANNELS_KEY: torch.cat([mask, latents], dim=1)}
        if self.embeds:
            embeds: Tensor = self.pipeline.encode_image(Image.fromarray(frame), device)
            conditioning[EMBEDS_KEY] = embeds
        return conditioning
