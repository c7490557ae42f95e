"""Loss functions of DDRL (arXiv 2512.04332), per sample."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from wfm_ds.algorithms.base import QUANTILE_MARGIN
from wfm_ds.algorithms.sft import loss_weight
from wfm_ds.sampling.latents import require_latents, require_vectors, sample_mean
from wfm_ds.seeds import draw_uniform

# Training noise levels of Cosmos-Predict2.5: log-normal EDM levels (larger for video), and a few very high levels.
LOG_MEAN, LOG_STD, VIDEO_FACTOR = math.log(4.0), 1.2, math.sqrt(24.0)
HIGH_NOISE_FRACTION, HIGH_NOISE_LEVELS = 0.05, (200.0, 1e5)


def log_ratio(
    velocity: Tensor,
    old_velocity: Tensor,
    noise: Tensor,
    gain: Tensor,
    std: Tensor,
    *,
    norm: str,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the log probability ratio log(pi / pi_old) of a transition, averaged over the elements of a sample: [B].

    The transition leads to X' = mu_old + std*noise. Its mean is mu for `velocity` (with gradient) and mu_old for
    `old_velocity`. Velocities and noise are [B,C,h,w] or [B,C,T,h,w] float32. gain = d(mu)/d(velocity)/std and std are
    [B] (see EdmStep). mask: [B,1,T,1,1], 0 on conditioning frames; None if all frames count. With

        d = (mu - mu_old)/std = gain*(velocity - old_velocity)
        q = mean((X' - mu)^2 - (X' - mu_old)^2)

    the result depends on `norm`:

        gaussian    -q/(2 std^2) = mean(noise*d - d^2/2)
        literal     -q, as in the published code; in EDM coordinates, high noise levels dominate this loss
        std_scaled  -q/(2 std)

    Equal velocities give exactly 0. Raises ValueError for wrong shapes or dtypes.
    """
    require_latents(velocity=velocity, old_velocity=old_velocity, noise=noise)
    require_vectors(velocity, gain=gain, std=std)
    d = (velocity - old_velocity) * broadcast_over_latents(gain, velocity)
    scale = {"gaussian": torch.ones_like(std), "literal": 2 * std.square(), "std_scaled": std}[norm]
    return sample_mean(noise * d - d.square() / 2, mask) * scale


def reference_kl(
    velocity: Tensor, ref_velocity: Tensor, gain: Tensor, std: Tensor, *, norm: str, mask: Tensor | None = None
) -> Tensor:
    """Return the KL divergence between two Gaussian transitions, averaged over the elements of a sample: [B].

    It is mean((mu - mu_ref)^2)/(2 std^2), where mu is the mean of the transition for `velocity`, and mu_ref for
    `ref_velocity`. With norm `literal`, the result is mean((mu - mu_ref)^2), as in the published code. gain, std, mask:
    as in log_ratio.
    """
    require_latents(velocity=velocity, ref_velocity=ref_velocity)
    require_vectors(velocity, gain=gain, std=std)
    d = (velocity - ref_velocity) * broadcast_over_latents(gain, velocity)
    return sample_mean(d.square(), mask) * (std.square() if norm == "literal" else 0.5)


def data_loss(velocity: Tensor, clean: Tensor, noise: Tensor, sigma: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the EDM loss (1 + S^2)/S^2 * mean((x0 - x0_hat)^2), [B], with the EDM noise level S = sigma/(1 - sigma).

    x0 is `clean`, and x0_hat is the prediction of x0 from the velocity at the noisy latents. The loss equals ((1 -
    sigma)^2 + sigma^2) * (mean squared velocity error). sigma: [B]. The shapes of all other tensors are as in
    log_ratio.
    """
    require_latents(velocity=velocity, clean=clean, noise=noise)
    require_vectors(velocity, sigma=sigma)
    return loss_weight("edm", sigma) * sample_mean((velocity - (noise - clean)).square(), mask)


def draw_data_sigma(run_seed: int, *key: int | str, video: bool) -> float:
    """Draw a noise level sigma in (0, 1) from Cosmos-Predict2.5's training density. Equal arguments give equal levels.

    video: whether to use the density for videos, which has higher noise levels.
    """
    quantile = min(max(draw_uniform(run_seed, "data_sigma", *key), QUANTILE_MARGIN), 1 - QUANTILE_MARGIN)
    if draw_uniform(run_seed, "data_sigma_noisy", *key) < HIGH_NOISE_FRACTION:
        low, high = map(math.log, HIGH_NOISE_LEVELS)
        log_level = low + quantile * (high - low)
    else:
        log_level = NormalDist(LOG_MEAN, LOG_STD).inv_cdf(quantile) + (math.log(VIDEO_FACTOR) if video else 0.0)
    return 1 / (1 + math.exp(-log_level))


def broadcast_over_latents(vector: Tensor, latents: Tensor) -> Tensor:
    """Reshape [B] to [B,1,...,1], to broadcast over latents [B, ...]."""
    return vector.view(-1, *[1] * (latents.ndim - 1))
