"""Forward passes of the denoiser, counted by purpose and optionally checked for agreement between ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.types import Conditioning


class DenoiseFunction(Protocol):
    """Signature of DiffusionModel.denoise. Returns the velocity eps - x0 in float32, in the shape of the latents."""

    def __call__(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor: ...


class ForwardFunction(Protocol):
    """Signature of a forward pass that is counted by purpose: rollout, policy, old, ref, validation, uncond, ..."""

    def __call__(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor: ...


class CountingForward:
    """A ForwardFunction that counts its forward passes (`counts`) and their samples (`num_samples`) by purpose."""

    def __init__(
        self, denoise: DenoiseFunction, engine: DenoiserEngine | None = None, *, one_size: bool = True
    ) -> None:
        """engine: engine that checks that the ranks agree before each forward pass; None for no check.

        one_size: whether all replicas use the same height and width, so that the check includes them.
        """
        self._denoise, self._engine, self._one_size = denoise, engine, one_size
        self.counts: Counter[str] = Counter()
        self.num_samples: Counter[str] = Counter()

    def reset_counts(self) -> None:
        self.counts.clear()
        self.num_samples.clear()

    def __call__(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None, /
    ) -> Tensor:
        """Return the velocity [B, ...] float32 for latents [B, ...] at sigma [B] under the active policy.

        expert: index of the expert that runs all samples (of a two-expert model); None: the model finds it from sigma.
        """
        self.counts[purpose] += 1
        self.num_samples[purpose] += len(sigma)
        if self._engine is not None:
            shape = latents.shape if self._one_size else latents.shape[:-2]
            what = (self._engine.active_policy, torch.is_grad_enabled(), tuple(shape), expert)
            self._engine.check_ranks_agree(*what, inputs=(latents, sigma, *conditioning.values()))
        return self._denoise(latents, sigma, conditioning, expert)
