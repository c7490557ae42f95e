"""Surrogate losses of policy gradients: probability ratio * advantage, with the ratio limited to a trust region."""

from __future__ import annotations

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.sampling.latents import require_vectors, sample_mean


def ppo_clip_loss(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return max(-A*rho, -A*clip(rho, 1 - clip_low, 1 + clip_high)), [B], with A = advantage, rho = exp(log_ratio).

    All tensors are [B] float32. Raises ValueError for other shapes.
    """
    require_vectors(log_ratio, log_ratio=log_ratio, advantage=advantage)
    ratio = torch.exp(log_ratio)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))


def divergence_policy_loss(log_ratio: Tensor, divergence: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """Return the Flow-DPPO loss -A*rho, [B], with A = advantage and rho = exp(log_ratio). All tensors are [B] float32.

    Loss and gradient are 0 if the divergence from the old policy is at least `bound` and the ratio has moved in the
    direction of the advantage. Raises ValueError for other shapes.
    """
    require_vectors(log_ratio, log_ratio=log_ratio, divergence=divergence, advantage=advantage)
    dropped = (divergence >= bound) & (log_ratio.sign() * advantage.sign() > 0)
    # Mask before the exponential too: the gradient of an infinite ratio times 0 would be NaN.
    ratio = torch.exp(log_ratio.masked_fill(dropped, 0.0))
    return (-advantage * ratio).masked_fill(dropped, 0.0)


def step_divergence(mean: Tensor, old_mean: Tensor, std: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the KL divergence per element of N(mean, s^2) from N(old_mean, s^2), [B], detached.

    mean, old_mean: [B, ...]. std: s, [B].
    """
    return (sample_mean((mean - old_mean).square(), mask) / (2 * std.square())).detach()


def outside_clip_range(log_ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return two masks [B]: ratios above 1 + clip_high, and ratios below 1 - clip_low."""
    deviation = torch.expm1(log_ratio)
    return deviation > clip_high, deviation < -clip_low


def ratio_stats(log_ratio: Tensor, higher: Tensor, lower: Tensor, advantage: Tensor) -> Stats:
    """Return detached metrics [B] of the probability ratio.

    higher, lower: masks [B] of ratios above and below the trust region.
    """
    deviation = torch.expm1(log_ratio)
    active = torch.where(advantage > 0, higher, lower & (advantage < 0))
    return {
        "policy/ratio_mean": 1 + deviation,
        "policy/ratio_std": deviation,  # ratio - 1 has the same std and is more precise
        "policy/ratio_max_abs_dev": deviation.abs(),
        "policy/clip_fraction_higher": higher.float(),
        "policy/clip_fraction_lower": lower.float(),
        "policy/clip_fraction_active": active.float(),
    }
