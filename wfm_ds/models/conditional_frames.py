"""Conditional frames: the first latent frames of a video may be known instead of noisy.

They travel in the conditioning under two keys, both or neither: `conditional_latents`, the clean latents of the whole
video's shape, and `conditional_mask` M [B,1,T,1,1] float32, 1 on conditional frames; rows of a batch may differ.
Without the keys M is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from wfm_ds.sampling.shapes import free_frames
from wfm_ds.types import ConditionalFrames

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

LATENTS, MASK = "conditional_latents", "conditional_mask"
KEYS = frozenset({LATENTS, MASK})


@dataclass(frozen=True, slots=True)
class FramesInLatents:
    """The given frames: latents [B,C,T,h,w] and mask [B,1,T,1,1], float32."""

    latents: Tensor
    mask: Tensor

    def enter(self, noisy: Tensor) -> Tensor:
        """Return the input of the network: the known latents on conditional frames, `noisy` elsewhere."""
        return self.mask * self.latents + (1 - self.mask) * noisy

    def leave(self, velocity: Tensor, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The velocity: on conditional frames the one whose x0_hat = noisy - sigma * v is known, else `velocity`."""
        known = (noisy - self.latents) / sigma.view(-1, 1, 1, 1, 1)
        return self.mask * known + (1 - self.mask) * velocity


def frames_in(conditioning: Conditioning) -> FramesInLatents | None:
    """The conditional frames that a conditioning holds. ValueError if it holds one of the two keys."""
    present = KEYS & conditioning.keys()
    if not present:
        return None
    if present != KEYS:
        raise ValueError(f"a conditioning holds both of {sorted(KEYS)} or neither, got {sorted(present)}")
    return FramesInLatents(conditioning[LATENTS], conditioning[MASK])


def padded(latents: Tensor, num_frames: int) -> Tensor:
    """Latents [..., t,h,w] of the first frames of a video as those [..., T,h,w] of all, zeros behind them."""
    return pad(latents, (0, 0, 0, 0, 0, num_frames - latents.shape[-3]))


def with_conditional_frames(conditioning: Conditioning, latents: Tensor, counts: Tensor) -> Conditioning:
    """The conditioning plus the first counts[i] latent frames of latents[i]; counts [B] integer, 0 for none.

    latents [B,C,T,h,w] float32, normalised. ValueError for other shapes, or a count that leaves no frame free.
    """
    if latents.ndim != 5 or latents.dtype != torch.float32 or counts.shape != latents.shape[:1]:
        raise ValueError(
            f"conditional frames need latents [B,C,T,h,w] float32 and [B] counts, got {list(latents.shape)} "
            f"{latents.dtype} and {list(counts.shape)}"
        )
    num_frames = latents.shape[2]
    if counts.device.type == "cpu" and not bool(((counts >= 0) & (counts < num_frames)).all()):
        raise ValueError(f"of {num_frames} latent frames 0 to {num_frames - 1} may be given, got {counts.tolist()}")
    return {**conditioning, LATENTS: latents, MASK: 1 - free_frames(ConditionalFrames(latents, counts))}
