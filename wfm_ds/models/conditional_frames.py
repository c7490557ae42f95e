"""Given (conditioning) frames: the first latent frames of a video may be known instead of noisy.

They travel in the conditioning under two keys, both or neither: `given_latents`, the clean latents of the whole video's
shape, and `given_mask` M [B,1,T,1,1] float32, 1 on given frames; rows of a batch may differ. Without the keys M is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning

LATENTS, MASK = "given_latents", "given_mask"
KEYS = frozenset({LATENTS, MASK})


@dataclass(frozen=True, slots=True)
class GivenFrames:
    """What is given: latents [B,C,T,h,w] and mask [B,1,T,1,1], float32."""

    latents: Tensor
    mask: Tensor

    def enter(self, noisy: Tensor) -> Tensor:
        """What the network sees: the given latents on given frames, `noisy` elsewhere."""
        return self.mask * self.latents + (1 - self.mask) * noisy

    def leave(self, velocity: Tensor, noisy: Tensor, sigma: Tensor) -> Tensor:
        """The velocity whose x0_hat = noisy - sigma * v is the given latents on given frames; `velocity` elsewhere."""
        known = (noisy - self.latents) / sigma.view(-1, 1, 1, 1, 1)
        return self.mask * known + (1 - self.mask) * velocity


def given_frames(conditioning: Conditioning) -> GivenFrames | None:
    """The given frames that a conditioning holds. ValueError if it holds one of the two keys."""
    present = KEYS & conditioning.keys()
    if not present:
        return None
    if present != KEYS:
        raise ValueError(f"a conditioning holds both of {sorted(KEYS)} or neither, got {sorted(present)}")
    return GivenFrames(conditioning[LATENTS], conditioning[MASK])


def with_given(conditioning: Conditioning, latents: Tensor, counts: Tensor) -> Conditioning:
    """The conditioning plus the first counts[i] latent frames of latents[i]; counts [B] integer, 0 for none.

    latents [B,C,T,h,w] float32, normalised. ValueError for other shapes, or a count that leaves no frame free.
    """
    if latents.ndim != 5 or latents.dtype != torch.float32 or counts.shape != latents.shape[:1]:
        raise ValueError(
            f"given frames need latents [B,C,T,h,w] float32 and [B] counts, got {list(latents.shape)} {latents.dtype} "
            f"and {list(counts.shape)}"
        )
    num_frames = latents.shape[2]
    if counts.device.type == "cpu" and not bool(((counts >= 0) & (counts < num_frames)).all()):
        raise ValueError(f"of {num_frames} latent frames 0 to {num_frames - 1} may be given, got {counts.tolist()}")
    frames = torch.arange(num_frames, device=latents.device)
    mask = (frames < counts.to(latents.device)[:, None]).float().view(-1, 1, num_frames, 1, 1)
    return {**conditioning, LATENTS: latents, MASK: mask}
