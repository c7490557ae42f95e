"""The first frame of a video as Wan's image-to-video networks are told it: channels beside the latents, and in 2.1
CLIP's embeddings of the picture."""

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
KEPT_BYTES = 2**30  # of conditions on the host: 120 of 81 frames of 480 x 832


class ImageConditions:
    """Conditions of first frames, each encoded alone and once: a run asks for one at every noise level of a sample."""

    def __init__(self, pipeline: Any, *, embeds: bool, kept_bytes: int = KEPT_BYTES) -> None:
        """embeds: the network takes CLIP's embeddings too. kept_bytes: of those that were asked for last."""
        self.pipeline, self.embeds, self._free = pipeline, embeds, kept_bytes
        self._kept: OrderedDict[tuple[bytes, int], Conditioning] = OrderedDict()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what `of` gives."""
        return (CHANNELS, EMBEDS) if self.embeds else (CHANNELS,)

    def of(self, frames: Sequence[npt.NDArray[np.uint8]], num_frames: int, device: torch.device) -> Conditioning:
        """Encode what videos of num_frames begin with, frames [H,W,3]: image_channels [B,f+C,T,h,w] float32, in f
        channels (the VAE's factor in time) a mask that is 1 on the first latent frame, then normalised latents of the
        frame with grey behind it; and, if the network takes them, image_embeds [B,n,D] in the dtype of CLIP."""
        rows = [self._of(frame, num_frames) for frame in frames]
        return {name: on_device(torch.cat([row[name] for row in rows]), device) for name in rows[0]}

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes of what `of` gives for latents [C,T,h,w], without the batch."""
        channels, *grid = shape
        found = {CHANNELS: (self.pipeline.vae_scale_factor_temporal + channels, *grid)}
        if not self.embeds:
            return found
        clip = self.pipeline.image_encoder.config
        return {**found, EMBEDS: ((clip.image_size // clip.patch_size) ** 2 + 1, clip.hidden_size)}

    def _of(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        key = blake2b(repr(frame.shape).encode() + frame.tobytes()).digest(), num_frames
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._encoded(frame, num_frames)
        self._kept[key] = made
        self._free -= num_bytes(made)
        while self._free < 0 and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._free += num_bytes(oldest)
        return made

    @torch.no_grad()
    def _encoded(self, frame: npt.NDArray[np.uint8], num_frames: int) -> Conditioning:
        """One row on the host, as the stock pipeline's prepare_latents and encode_image make it."""
        device = self.pipeline.vae.device
        pixels = on_device(torch.from_numpy(frame), device).permute(2, 0, 1).float() / 255
        clip = pixels.new_zeros(1, 3, num_frames, *pixels.shape[1:])  # grey behind the frame: 0 of -1 to 1
        clip[0, :, 0] = 2 * pixels - 1
        latents = vae.encode(self.pipeline.vae, clip)
        mask = latents.new_zeros(1, self.pipeline.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        made = {CHANNELS: torch.cat([mask, latents], dim=1).cpu()}
        if self.embeds:
            seen: Tensor = self.pipeline.encode_image(Image.fromarray(frame), device)
            made[EMBEDS] = seen.cpu()
        return made


def num_bytes(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.values())
