"""The terms of the DDRL loss (arXiv 2512.04332), one number a sample each."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from wfm_ds.algorithms.sft import loss_weight
from wfm_ds.algorithms.terms import EDGE
from wfm_ds.sampling.shapes import require_latents, require_vectors, sample_mean
from wfm_ds.seeds import uniform

RATIO_NORMS = ("gaussian", "literal", "std_scaled")
# Cosmos-Predict2.5's density of EDM training levels: log-normal, wider for video, and a share of very noisy ones.
LOG_MEAN, LOG_STD, VIDEO_FACTOR = math.log(4.0), 1.2, math.sqrt(24.0)
NOISY_SHARE, NOISY_LEVELS = 0.05, (200.0, 1e5)


def log_ratio(
    velocity: Tensor,
    old_velocity: Tensor,
    noise: Tensor,
    gain: Tensor,
    std: Tensor,
    *,
    norm: str,
    free: Tensor | None = None,
) -> Tensor:
    """log(pi / pi_old) of the transition X' = mu_old + std*noise, a mean over free elements: [B].

    velocity (with gradient), old_velocity and noise [B,C,h,w] or [B,C,T,h,w] float32; gain = d(mu)/d(velocity)/std and
    std [B] of the transitions (EdmStep); free [B,1,T,1,1] is 0 on conditional frames, absent where all are free. With
    d = (mu - mu_old)/std = gain*(velocity - old_velocity) and q = mean((X' - mu)^2 - (X' - mu_old)^2):

        gaussian    -q/(2 std^2) = mean(noise*d - d^2/2), the same in any coordinates
        literal     -q, as the published code has it: EDM coordinates, high noise counts most
        std_scaled  -q/(2 std)

    Exactly 0 for equal velocities: no two squares are subtracted. ValueError for another norm, shape or dtype.
    """
    require_latents(velocity=velocity, old_velocity=old_velocity, noise=noise)
    require_vectors(velocity, gain=gain, std=std)
    d = (velocity - old_velocity) * over_elements(gain, velocity)
    return sample_mean(noise * d - d.square() / 2, free) * _scale(norm, std)


def _scale(norm: str, std: Tensor) -> Tensor:
    match norm:
        case "gaussian":
            return torch.ones_like(std)
        case "literal":
            return 2 * std.square()
        case "std_scaled":
            return std
    raise ValueError(f"{norm!r} is no way to scale the ratio; there are {', '.join(RATIO_NORMS)}")


def reference_kl(
    velocity: Tensor, ref_velocity: Tensor, gain: Tensor, std: Tensor, *, norm: str, free: Tensor | None = None
) -> Tensor:
    """mean((mu - mu_ref)^2)/(2 std^2), the KL of the two transitions by element: [B]; arguments as for log_ratio.

    `literal` leaves the division out, like the published code.
    """
    require_latents(velocity=velocity, ref_velocity=ref_velocity)
    require_vectors(velocity, gain=gain, std=std)
    d = (velocity - ref_velocity) * over_elements(gain, velocity)
    return sample_mean(d.square(), free) * (std.square() if norm == "literal" else 0.5)


def data_loss(velocity: Tensor, clean: Tensor, noise: Tensor, sigma: Tensor, free: Tensor | None = None) -> Tensor:
    """The EDM loss of data, (1 + S^2)/S^2 * mean((x0 - x0_hat)^2), from the velocity at its noisy latents: [B].

    As an error of the velocity its weight is (1 - sigma)^2 + sigma^2. Shapes as for log_ratio, sigma [B].
    """
    require_latents(velocity=velocity, clean=clean, noise=noise)
    require_vectors(velocity, sigma=sigma)
    return loss_weight("edm", sigma) * sample_mean((velocity - (noise - clean)).square(), free)


def data_sigma(run_seed: int, *key: int | str, video: bool) -> float:
    """A noise level from Cosmos-Predict2.5's training density, in (0, 1), drawn by key."""
    share = min(max(uniform(run_seed, "data_sigma", *key), EDGE), 1 - EDGE)
    if uniform(run_seed, "data_sigma_noisy", *key) < NOISY_SHARE:
        low, high = map(math.log, NOISY_LEVELS)
        log_level = low + share * (high - low)
    else:
        log_level = NormalDist(LOG_MEAN, LOG_STD).inv_cdf(share) + (math.log(VIDEO_FACTOR) if video else 0.0)
    return 1 / (1 + math.exp(-log_level))


def over_elements(vector: Tensor, latents: Tensor) -> Tensor:
    """[B] as [B,1,...,1], to be multiplied with latents."""
    return vector.view(-1, *[1] * (latents.ndim - 1))
