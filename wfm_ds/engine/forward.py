"""The one way to a forward of the denoiser: counted by purpose, and where that is asked for compared between ranks.

Which policy computes and whether a gradient is kept is the caller's matter (engine.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.types import Conditioning


class Denoise(Protocol):
    """DiffusionModel.denoise: the velocity eps - x0 in float32, in the shape of the latents."""

    def __call__(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor: ...


class Forward(Protocol):
    """One forward, for a purpose: rollout, policy, old, ref, validation, uncond, ..."""

    def __call__(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor: ...


class CountedForward:
    """A `Forward` that counts, by purpose, since it was last cleared: `counts` has the forwards of this rank,
    `num_samples` the samples in them, which do not depend on how they were batched."""

    def __init__(self, denoise: Denoise, engine: DenoiserEngine | None = None, *, one_size: bool = True) -> None:
        """engine: of a training run, whose guard compares the ranks. one_size: all replicas work on media of one height
        and width, which the guard may then compare too."""
        self._denoise, self._engine, self._one_size = denoise, engine, one_size
        self.counts: Counter[str] = Counter()
        self.num_samples: Counter[str] = Counter()

    def clear(self) -> None:
        """Count from zero again."""
        self.counts.clear()
        self.num_samples.clear()

    def __call__(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor:
        """Velocity [B, ...] float32 of latents [B, ...] at sigma [B] under the policy in use.

        expert: the one that all of sigma belong to; None: the model looks it up.
        """
        self.counts[purpose] += 1
        self.num_samples[purpose] += len(sigma)
        if self._engine is not None:
            shape = latents.shape if self._one_size else latents.shape[:-2]
            what = (self._engine.active, torch.is_grad_enabled(), tuple(shape), expert)
            self._engine.guard_check(*what, inputs=(latents, sigma, *conditioning.values()))
        return self._denoise(latents, sigma, conditioning, expert)
