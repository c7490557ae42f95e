"""The public operators: validation and backend selection. The registered torch operators are in library.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wfm_kernels import library
from wfm_kernels.backends import Backend, should_use_triton
from wfm_kernels.checks import (
    LATENT_DTYPES,
    require_coefficients,
    require_floating,
    require_latents,
    require_one_source,
    require_vectors,
)

MAX_ROW = 32_768  # elements of a row that one program of quantise_rows holds


@dataclass(frozen=True, slots=True)
class SdeStep:
    """Result of `sde_step`. All tensors are detached."""

    next_latents: Tensor  # shape and dtype of the latents
    log_prob: Tensor  # [B] float32, of the rounded next_latents
    mean: Tensor | None  # float32, shape of the latents; None without return_mean


@dataclass(frozen=True, slots=True)
class NftLoss:
    """DiffusionNFT losses and statistics of each sample, [B] float32."""

    policy: Tensor
    kl: Tensor | None  # None without a reference
    stats: dict[str, Tensor]  # detached


def sde_step(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    *,
    seeds: Tensor | None = None,
    noise: Tensor | None = None,
    uncond_velocity: Tensor | None = None,
    guidance_scale: float = 1.0,
    return_mean: bool = False,
    backend: Backend = "auto",
) -> SdeStep:
    """Run one denoising step of any sampler in sde_coefficients, and return the log-probability of the result.

    velocity, latents: [B, ...] of one shape, each float32, bfloat16 or float16.
    coefficients: [B,5] float64; one expanded row is allowed.
    seeds, noise: exactly one of them; seeds [B] int64 (see noise.py), noise of the latents' shape. Unused if std is 0.
    uncond_velocity: if given, the velocity is u + guidance_scale * (v - u), computed in float32.

    log_prob is computed from next_latents rounded to the latents' dtype, so sde_log_prob returns the same bits for
    them. Not differentiable. Raises ValueError for invalid arguments.
    """
    require_latents(velocity=velocity, latents=latents, uncond_velocity=uncond_velocity, noise=noise)
    require_coefficients(coefficients, latents)
    require_one_source(latents, seeds, noise)
    latents = latents.detach()
    triton = should_use_triton(backend, latents, velocity, coefficients, seeds, noise, uncond_velocity)
    next_latents, log_prob, mean = library.sde_step(
        velocity.detach(),
        latents,
        coefficients,
        seeds,
        None if noise is None else noise.detach(),
        None if uncond_velocity is None else uncond_velocity.detach(),
        guidance_scale,
        return_mean,
        triton,
    )
    return SdeStep(next_latents, log_prob, mean if return_mean else None)


def sde_log_prob(
    velocity: Tensor,
    latents: Tensor,
    next_latents: Tensor,
    coefficients: Tensor,
    *,
    uncond_velocity: Tensor | None = None,
    guidance_scale: float = 1.0,
    backend: Backend = "auto",
) -> Tensor:
    """Return the log-probability [B] float32 of stored steps, averaged over the elements of a sample.

    Arguments as in sde_step, which returns the same bits for the same velocity dtype. Differentiable once, with respect
    to velocity and uncond_velocity; gradients have the dtype of their input. In float16, scale the loss: gradients of a
    mean over a sample are subnormal otherwise. Raises ValueError for invalid arguments.
    """
    require_latents(velocity=velocity, latents=latents, next_latents=next_latents, uncond_velocity=uncond_velocity)
    require_coefficients(coefficients, latents)
    triton = should_use_triton(backend, latents, velocity, next_latents, coefficients, uncond_velocity)
    log_prob: Tensor = library.sde_log_prob(
        velocity, latents.detach(), next_latents.detach(), coefficients, uncond_velocity, guidance_scale, triton
    )
    return log_prob


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    clean_latents: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    *,
    beta: float,
    ref_velocity: Tensor | None = None,
    backend: Backend = "auto",
) -> NftLoss:
    """Return the DiffusionNFT loss (arXiv 2509.16117) per sample: policy loss, KL to a reference, statistics.

    Latents and velocities: [B, ...] of one shape, each float32, bfloat16 or float16.
    sigma, reward_weight: [B] float32; reward_weight r must be in [0, 1], which is not checked.

    With u = noise - clean_latents, e = sigma (u - v_old), d = sigma beta (v - v_old), p = e - d and q = e + d:

        w+ = max(mean|p|, 1e-5)     w- = max(mean|q|, 1e-5)          (without gradient)
        policy = (r mean(p^2)/w+ + (1-r) mean(q^2)/w-) / beta         kl = mean((v - v_ref)^2)

    p and q are the published x0 errors, computed without the noisy latents to avoid cancellation. Differentiable once,
    with respect to velocity only.

    stats: loss_positive, loss_negative (the two quotients), weight_positive, weight_negative (w+, w-), old_deviation,
    old_deviation_max (mean and maximum of (v - v_old)^2), and with a reference old_ref_deviation (mean of (v_old -
    v_ref)^2). Raises ValueError for invalid shapes and dtypes, and for beta <= 0.
    """
    require_latents(
        velocity=velocity,
        old_velocity=old_velocity,
        clean_latents=clean_latents,
        noise=noise,
        ref_velocity=ref_velocity,
    )
    require_vectors(clean_latents, sigma=sigma, reward_weight=reward_weight)
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    triton = should_use_triton(
        backend, velocity, old_velocity, clean_latents, noise, sigma, reward_weight, ref_velocity
    )
    policy, kl, stat_rows = library.nft_loss(
        velocity,
        old_velocity.detach(),
        clean_latents.detach(),
        noise.detach(),
        sigma,
        reward_weight,
        None if ref_velocity is None else ref_velocity.detach(),
        beta,
        triton,
    )
    names = library.NFT_STATS if ref_velocity is not None else library.NFT_STATS[:-1]
    stats = dict(zip(names, stat_rows.detach().unbind(), strict=False))
    return NftLoss(policy, None if ref_velocity is None else kl, stats)


def flow_noise(
    clean_latents: Tensor,
    sigma: Tensor,
    *,
    seeds: Tensor | None = None,
    noise: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return ((1 - sigma) * clean_latents + sigma * noise, noise). Not differentiable.

    clean_latents: [B, ...] float32, bfloat16 or float16; the noisy latents have the same dtype. sigma: [B] float32.
    seeds, noise: exactly one of them; seeds [B] int64 (see noise.py), noise float32 of the latents' shape. Raises
    ValueError for invalid arguments.
    """
    require_latents(clean_latents=clean_latents, noise=noise)
    require_vectors(clean_latents, sigma=sigma)
    require_one_source(clean_latents, seeds, noise)
    if noise is not None:
        require_floating(clean_latents, noise=noise)
        noise = noise.detach()
    triton = should_use_triton(backend, clean_latents, sigma, seeds, noise)
    noisy, new_noise = library.flow_noise(clean_latents.detach(), sigma, seeds, noise, triton)
    return noisy, new_noise if noise is None else noise


def quantise_rows(x: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Quantize each row to float8 e4m3. Return q (shape of x) and scales float32 [..., 1], x ~ q * scale.

    x: [..., K] float32, bfloat16 or float16. A row's scale is its largest magnitude / 448 (the maximum of e4m3), or 1
    for a row of zeros. Values are rounded to nearest even. If a row contains NaN or infinity, its products are NaN, so
    that the error stays visible. Not differentiable. Raises ValueError for other dtypes, an empty x, or K above 32768.
    """
    if x.dtype not in LATENT_DTYPES or x.ndim == 0 or x.numel() == 0 or x.shape[-1] > MAX_ROW:
        raise ValueError(
            f"x must be [..., K] float32, bfloat16 or float16, not empty, with K at most {MAX_ROW}, got "
            f"{list(x.shape)} {x.dtype}"
        )
    q, scale = library.quantise_rows(x.detach(), should_use_triton(backend, x[:1]))
    return q, scale
