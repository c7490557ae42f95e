"""The surrogate losses of policy gradients: a ratio of new to old probability times an advantage, in a trust region."""

from __future__ import annotations

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.sampling.shapes import require_vectors, sample_mean


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """max(-A*rho, -A*clip(rho, 1 - clip_low, 1 + clip_high)) of each term [B], rho = exp(log_ratio); all [B] float32.

    Raises ValueError for other shapes: a [B,1] would give every term the mean credit.
    """
    require_vectors(log_ratio, log_ratio=log_ratio, advantage=advantage)
    ratio = torch.exp(log_ratio)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))


def divergence_policy_loss(log_ratio: Tensor, divergence: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """Flow-DPPO's loss of each term [B]: -A*rho, rho = exp(log_ratio); 0, also as a gradient, for a term whose policy
    is away from the old one by at least `bound` and whose ratio has moved on with its advantage. All [B] float32.

    Raises ValueError for other shapes.
    """
    require_vectors(log_ratio, log_ratio=log_ratio, divergence=divergence, advantage=advantage)
    dropped = (divergence >= bound) & (log_ratio.sign() * advantage.sign() > 0)
    # Masked before the exponential too: the gradient of an infinite ratio times 0 is not a number.
    ratio = torch.exp(log_ratio.masked_fill(dropped, 0.0))
    return (-advantage * ratio).masked_fill(dropped, 0.0)


def step_divergence(mean: Tensor, old_mean: Tensor, std: Tensor, free: Tensor | None = None) -> Tensor:
    """KL of two denoise steps N(mean, s^2) and N(old_mean, s^2) over the number of elements, constant:
    mean((mean - old_mean)^2)/(2 s^2) [B]. Means [B, ...] of one shape, std [B]; free as in sample_mean."""
    return (sample_mean((mean - old_mean).square(), free) / (2 * std.square())).detach()


def outside_clip(log_ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Tell which ratios [B] are above 1 + clip_high, and which below 1 - clip_low."""
    deviation = torch.expm1(log_ratio)
    return deviation > clip_high, deviation < -clip_low


def ratio_stats(log_ratio: Tensor, higher: Tensor, lower: Tensor, advantage: Tensor) -> Stats:
    """Measure the ratios; higher, lower: those that left the trust region upwards and downwards. All detached [B]."""
    deviation = torch.expm1(log_ratio)
    active = torch.where(advantage > 0, higher, lower & (advantage < 0))
    return {
        "policy/ratio_mean": 1 + deviation,
        "policy/ratio_std": deviation,  # that of the ratio, without the digits that its 1 costs
        "policy/ratio_max_abs_dev": deviation.abs(),
        "policy/clip_fraction_higher": higher.float(),
        "policy/clip_fraction_lower": lower.float(),
        "policy/clip_fraction_active": active.float(),
    }
