"""Conditioning frames: the first latent frames of a video may be clean instead of noisy.

`conditional_latents` contains clean latents, in the shape [B,C,T,h,w] of the noisy latents. `conditional_mask`, float32
[B,1,T,1,1], is 1 on conditioning frames and 0 on noisy frames. A conditioning contains both tensors or neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from wfm_ds.sampling.latents import free_frame_mask
from wfm_ds.types import Conditioning, ConditioningFrames

LATENTS_KEY, MASK_KEY = "conditional_latents", "conditional_mask"
CONDITIONING_FRAME_KEYS = frozenset({LATENTS_KEY, MASK_KEY})


@dataclass(frozen=True, slots=True)
class CleanFrames:
    """Clean conditioning frames of a batch of videos.

    latents: float32 [batch, channels, latent frames, h, w].
    mask: float32 [batch, 1, latent frames, 1, 1], which is 1 on conditioning frames and 0 on noisy frames.
    """

    latents: Tensor
    mask: Tensor

    def insert_clean_latents(self, noisy: Tensor) -> Tensor:
        """Return a copy of the noisy latents with clean latents on the conditioning frames."""
        return self.mask * self.latents + (1 - self.mask) * noisy

    def insert_known_velocity(self, velocity: Tensor, noisy: Tensor, sigma: Tensor) -> Tensor:
        """Return a copy of `velocity` with the exact velocity (noisy - clean) / sigma on conditioning frames."""
        known = (noisy - self.latents) / sigma.view(-1, 1, 1, 1, 1)
        return self.mask * known + (1 - self.mask) * velocity


def get_clean_frames(conditioning: Conditioning) -> CleanFrames | None:
    """Return the clean frames in a conditioning, or None if it has none.

    Raises ValueError if the conditioning has only the latents or only the mask.
    """
    present = CONDITIONING_FRAME_KEYS & conditioning.keys()
    if not present:
        return None
    if present != CONDITIONING_FRAME_KEYS:
        raise ValueError(
            f"conditioning must have both of {sorted(CONDITIONING_FRAME_KEYS)} or neither, got {sorted(present)}"
        )
    return CleanFrames(conditioning[LATENTS_KEY], conditioning[MASK_KEY])


def pad_num_frames(latents: Tensor, num_frames: int) -> Tensor:
    """Append zeros to latents [..., latent frames, h, w] until they have `num_frames` latent frames."""
    return pad(latents, (0, 0, 0, 0, 0, num_frames - latents.shape[-3]))


def add_clean_frames(conditioning: Conditioning, latents: Tensor, counts: Tensor) -> Conditioning:
    """Return a copy of the conditioning that makes the first counts[i] latent frames of sample i conditioning frames.

    latents: clean normalized latents [B,C,T,h,w] float32. counts: [B] integers from 0 to T - 1.
    Raises ValueError for invalid latents or counts.
    """
    if latents.ndim != 5 or latents.dtype != torch.float32 or counts.shape != latents.shape[:1]:
        raise ValueError(
            f"conditioning frames need latents [B,C,T,h,w] float32 and [B] counts, got {list(latents.shape)} "
            f"{latents.dtype} and {list(counts.shape)}"
        )
    num_frames = latents.shape[2]
    if counts.device.type == "cpu" and not bool(((counts >= 0) & (counts < num_frames)).all()):
        raise ValueError(
            f"the number of conditioning frames must be 0 to {num_frames - 1} of {num_frames} latent frames, got "
            f"{counts.tolist()}"
        )
    return {**conditioning, LATENTS_KEY: latents, MASK_KEY: 1 - free_frame_mask(ConditioningFrames(latents, counts))}
