"""Eager torch backend, for CPUs and machines without Triton. Computes in float32 (float64 for float64 latents).

Its functions have the same arguments and results as the functions in triton_backend.py.

Noise contract of both backends: each normal number depends only on its sample's seed and on its index in the sample.
Philox4x32-10 (Salmon et al. 2011) with the sample's seed as 64-bit key and the counter i div 4 gives four words. The
Box-Muller transform of these words gives four normal numbers, and number i of the sample is entry i mod 4 of them. The
words are equal on all devices. The normal numbers may differ between devices by less than 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_DTYPE = torch.float64  # for verifying formulas; only the torch backend supports it
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126  # the smallest normal float32: a GPU may flush smaller scales to zero
MIN_WEIGHT = 1e-5  # lower bound of the mean absolute error in the denominators of the NFT loss

WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# TO_UNIT maps 31-bit integers to [0, 1). It is the largest factor whose float32 products stay below 1. MIN_UNIFORM is a
# lower bound of uniform numbers, which bounds the magnitude of normal numbers.
TO_UNIT, MIN_UNIFORM = 4.6566127342e-10, 1e-7
TWO_PI = 6.283185307179586
NOISE_CONTRACT = 1  # version; increased when the numbers for a seed change

_BLOCK = 16384  # counters that are processed at once; limits the memory for words


def working_dtype(latents: Tensor) -> torch.dtype:
    """Return the dtype of sums, coefficients and losses: float64 if the latents are float64, and otherwise float32."""
    return EXACT_DTYPE if latents.dtype == EXACT_DTYPE else torch.float32


def philox_words(seeds: Tensor, num_counters: int, first: int = 0) -> Tensor:
    """Return the Philox words of the counters from `first` to `first + num_counters - 1`.

    seeds: int64 [B]. The result is int64 [B, num_counters, 4] with values in [0, 2**32).
    """
    multipliers, steps = (
        torch.tensor(pair, dtype=torch.int64, device=seeds.device).view(2, 1, 1) for pair in (MULTIPLIERS, KEY_STEPS)
    )
    rounds = torch.arange(ROUNDS, device=seeds.device).view(-1, 1, 1, 1)
    keys = (torch.stack([seeds & WORD_MASK, (seeds >> 32) & WORD_MASK]).unsqueeze(2) + rounds * steps) & WORD_MASK
    multiplied = torch.zeros(2, len(seeds), num_counters, dtype=torch.int64, device=seeds.device)
    multiplied[0] = torch.arange(first, first + num_counters, device=seeds.device)
    others = torch.zeros_like(multiplied)
    for key in keys.unbind():
        # int64 wraps like uint64. The mask removes the sign bits shifted in from above.
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32).bitwise_and_(WORD_MASK).bitwise_xor_(others).bitwise_xor_(key)
        others = product.bitwise_and_(WORD_MASK)
    return torch.stack([multiplied[0], others[0], multiplied[1], others[1]], dim=-1)


def normal_from_words(words: Tensor) -> Tensor:
    """Convert Philox words, int64 [..., 4], to standard normal numbers, float32 [..., 4]."""
    unit = torch.minimum(words, WORD_MASK - words).float() * TO_UNIT
    radius = (-2.0 * unit[..., 0::2].clamp_min(MIN_UNIFORM).log()).sqrt()
    angle = TWO_PI * unit[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Return n standard normal numbers per seed, float32 [B, n] on the device of the seeds. seeds: int64 [B]."""
    num_counters, at_once = -(-n // 4), max(1, _BLOCK // max(1, len(seeds)))
    blocks = [
        normal_from_words(philox_words(seeds, min(at_once, num_counters - first), first)).flatten(1)
        for first in range(0, num_counters, at_once)
    ]
    return torch.cat(blocks, dim=1)[:, :n].contiguous()


def _flatten_samples(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.reshape(len(tensor), -1).to(dtype)


def _step_mean(velocity: Tensor, latents: Tensor, coefficients: Tensor) -> Tensor:
    dtype = working_dtype(latents)
    c_x, c_v = coefficients[:, :2].to(dtype).unsqueeze(2).unbind(1)
    return c_x * _flatten_samples(latents, dtype) + c_v * _flatten_samples(velocity, dtype)


def _log_prob(next_latents: Tensor, mean: Tensor, coefficients: Tensor) -> Tensor:
    d = _flatten_samples(next_latents, mean.dtype) - mean
    w, c0 = coefficients[:, 3], coefficients[:, 4]
    return (c0 - w * (d * d).mean(1).double()).to(mean.dtype)


def sde_step(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    seeds: Tensor | None,
    noise: Tensor | None,
    return_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (next latents, log-probability of each sample, mean). The mean is empty unless return_mean is set."""
    mean = _step_mean(velocity, latents, coefficients)
    std = coefficients[:, 2:3].to(mean.dtype)
    if noise is None:
        assert seeds is not None
        z = normal_noise(seeds, mean.shape[1]).to(mean.dtype)
    else:
        z = _flatten_samples(noise, mean.dtype)
    next_latents = (mean + std * z).to(latents.dtype).view(latents.shape)  # rounded: training uses the stored values
    returned_mean = mean.view(latents.shape) if return_mean else mean.new_empty(0)
    return next_latents, _log_prob(next_latents, mean, coefficients), returned_mean


def sde_log_prob(velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor) -> Tensor:
    return _log_prob(next_latents, _step_mean(velocity, latents, coefficients), coefficients)


def sde_log_prob_backward(
    upstream: Tensor, velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor
) -> Tensor:
    """Return the gradient of the velocity."""
    mean = _step_mean(velocity, latents, coefficients)
    slope = upstream.double() * 2 * coefficients[:, 3] * coefficients[:, 1] / mean.shape[1]
    gradient = slope.to(mean.dtype).unsqueeze(1) * (_flatten_samples(next_latents, mean.dtype) - mean)
    return _restore_shape(gradient, velocity)


def _restore_shape(rows: Tensor, tensor: Tensor) -> Tensor:
    return rows.to(tensor.dtype).view(tensor.shape)


def _nft_errors(
    velocity: Tensor, old: Tensor, clean: Tensor, noise: Tensor, sigma: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the x0 errors of the positive and the negative policy, and velocity - old."""
    dtype = working_dtype(clean)
    s, v_old = sigma.unsqueeze(1), _flatten_samples(old, dtype)
    change = _flatten_samples(velocity, dtype) - v_old
    # If v equals v_old, this form gives bit-identical errors, and a gradient that is exactly proportional to the
    # advantage.
    error = s * (_flatten_samples(noise, dtype) - _flatten_samples(clean, dtype) - v_old)
    step = s * (beta * change)
    return error - step, error + step, change


def nft_loss(
    velocity: Tensor,
    old: Tensor,
    clean: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    ref: Tensor | None,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's policy loss, KL (0 without a reference), and statistics (in the order of NFT_STATS)."""
    positive, negative, change = _nft_errors(velocity, old, clean, noise, sigma, beta)
    weights = [error.abs().mean(1).clamp_min(MIN_WEIGHT) for error in (positive, negative)]
    losses = [error.square().mean(1) / w for error, w in zip((positive, negative), weights, strict=True)]
    policy = (reward_weight * losses[0] + (1 - reward_weight) * losses[1]) / beta
    squared = change.square()
    kl = old_to_ref = torch.zeros_like(policy)
    if ref is not None:
        v_ref = _flatten_samples(ref, change.dtype)
        kl = (_flatten_samples(velocity, change.dtype) - v_ref).square().mean(1)
        old_to_ref = (_flatten_samples(old, change.dtype) - v_ref).square().mean(1)
    return policy, kl, torch.stack([*losses, *weights, squared.mean(1), squared.amax(1), old_to_ref])


def nft_loss_backward(
    upstream: Tensor,
    upstream_kl: Tensor | None,
    velocity: Tensor,
    old: Tensor,
    clean: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    ref: Tensor | None,
    stats: Tensor,
    beta: float,
) -> Tensor:
    """Return the gradient with respect to the velocity. The weights stats[2] and stats[3] are treated as constants."""
    positive, negative, _ = _nft_errors(velocity, old, clean, noise, sigma, beta)
    n, r = positive.shape[1], reward_weight.double()
    scale = 2 * upstream.double() * sigma.double() / n
    slope_positive, slope_negative = -scale * r / stats[2].double(), scale * (1 - r) / stats[3].double()
    dtype = positive.dtype
    gradient = slope_positive.to(dtype).unsqueeze(1) * positive + slope_negative.to(dtype).unsqueeze(1) * negative
    if ref is not None:
        assert upstream_kl is not None
        slope = (2 * upstream_kl.double() / n).to(dtype).unsqueeze(1)
        gradient = gradient + slope * (_flatten_samples(velocity, dtype) - _flatten_samples(ref, dtype))
    return _restore_shape(gradient, velocity)


def flow_noise(clean: Tensor, sigma: Tensor, seeds: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    x0 = _flatten_samples(clean, working_dtype(clean))
    if noise is None:
        assert seeds is not None
        eps = normal_noise(seeds, x0.shape[1]).to(x0.dtype)
    else:
        eps = _flatten_samples(noise, x0.dtype)
    s = sigma.unsqueeze(1)
    noisy = _restore_shape((1 - s) * x0 + s * eps, clean)
    return noisy, eps.view(clean.shape) if noise is None else eps.new_empty(0)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8 e4m3 values in the shape of x, float32 scale of each row [..., 1])."""
    rows = x.float()
    greatest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(greatest == 0, 1.0, (greatest / E4M3_MAX).clamp_min(MIN_SCALE))
    # A quotient may be rounded up to more than the maximum of e4m3. Without the clamp, the cast would make it NaN.
    return (rows / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
