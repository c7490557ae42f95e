"""The public operators: contract, checks and choice of backend. What torch registers is in library.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wfm_kernels import library
from wfm_kernels.backends import Backend, use_triton
from wfm_kernels.checks import (
    DTYPES,
    require_coefficients,
    require_floating,
    require_latents,
    require_one_source,
    require_vectors,
)

MAX_ROW = 32_768  # elements of a row that one program of quantise_rows holds


@dataclass(frozen=True, slots=True)
class SdeStep:
    """Result of a step; all detached."""

    next_latents: Tensor  # shape and dtype of the latents
    log_prob: Tensor  # [B] float32, of next_latents as stored
    mean: Tensor | None  # float32, shape of the latents; None unless asked for


@dataclass(frozen=True, slots=True)
class NftLoss:
    """The parts of a DiffusionNFT loss, [B] float32."""

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
    """One denoise step of any sampler in sde_coefficients, and the log-probability of its outcome.

    velocity and latents [B, ...] of one shape, each float32, bfloat16 or float16; coefficients [B,5] float64 (one row
    of a table expanded is fine). Exactly one of seeds ([B] int64, the noise contract) and noise (shape of the latents);
    where std is 0 the noise counts for nothing. With uncond_velocity the velocity is u + guidance_scale * (v - u),
    combined in float32. Rounds to the dtype of the latents first and takes log_prob of what was stored, so that
    sde_log_prob of the same inputs gives the same bits. Not differentiable. Raises ValueError for anything else.
    """
    require_latents(velocity=velocity, latents=latents, uncond_velocity=uncond_velocity, noise=noise)
    require_coefficients(coefficients, latents)
    require_one_source(latents, seeds, noise)
    latents = latents.detach()
    triton = use_triton(backend, latents, velocity, coefficients, seeds, noise, uncond_velocity)
    moved, log_prob, mean = library.sde_step(
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
    return SdeStep(moved, log_prob, mean if return_mean else None)


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
    """Log-probability [B] float32 of stored transitions, the mean over the elements of a sample; see sde_step.

    Differentiable once, by velocity and uncond_velocity (a detached one costs nothing); a gradient has the dtype of its
    input. A float16 run must scale its loss before this: the gradients of a sample mean are subnormal there. The same
    bits as sde_step for the same velocity dtype. Raises ValueError as sde_step does.
    """
    require_latents(velocity=velocity, latents=latents, next_latents=next_latents, uncond_velocity=uncond_velocity)
    require_coefficients(coefficients, latents)
    triton = use_triton(backend, latents, velocity, next_latents, coefficients, uncond_velocity)
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
    """DiffusionNFT (arXiv 2509.16117), per sample and unreduced: the policy loss, the distance to a reference, figures.

    Latents and velocities [B, ...] of one shape, each float32, bfloat16 or float16; sigma and reward_weight (r, in
    [0, 1]; not checked here, that would wait for the device) are [B] float32. With u = noise - clean_latents,
    e = sigma (u - v_old), d = sigma beta (v - v_old), p = e - d and q = e + d:

        w+ = max(mean|p|, 1e-5)     w- = max(mean|q|, 1e-5)          constants
        policy = (r mean(p^2)/w+ + (1-r) mean(q^2)/w-) / beta         kl = mean((v - v_ref)^2)

    These are the x0 errors of the published form, without reading the noisy latents: nothing cancels. Differentiable
    once, by velocity alone. stats: loss_positive and loss_negative (the two quotients), weight_positive and
    weight_negative (w+-), old_deviation and old_deviation_max (mean and maximum of (v - v_old)^2), and with a reference
    old_ref_deviation (mean of (v_old - v_ref)^2). Raises ValueError for other shapes and dtypes (a [B,1] reward weight
    would give every sample the average credit of its batch) and for beta <= 0.
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
    triton = use_triton(backend, velocity, old_velocity, clean_latents, noise, sigma, reward_weight, ref_velocity)
    policy, kl, figures = library.nft_loss(
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
    stats = dict(zip(names, figures.detach().unbind(), strict=False))
    return NftLoss(policy, None if ref_velocity is None else kl, stats)


def flow_noise(
    clean_latents: Tensor,
    sigma: Tensor,
    *,
    seeds: Tensor | None = None,
    noise: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(1 - sigma) * clean_latents + sigma * noise, and the noise; not differentiable.

    clean_latents [B, ...] float32, bfloat16 or float16; sigma [B] float32; exactly one of seeds ([B] int64, the noise
    contract) and noise (float32, shape of the latents). The noisy latents have the dtype of the clean ones, the noise
    is float32. Raises ValueError for anything else.
    """
    require_latents(clean_latents=clean_latents, noise=noise)
    require_vectors(clean_latents, sigma=sigma)
    require_one_source(clean_latents, seeds, noise)
    if noise is not None:
        require_floating(clean_latents, noise=noise)
        noise = noise.detach()
    triton = use_triton(backend, clean_latents, sigma, seeds, noise)
    noisy, drawn = library.flow_noise(clean_latents.detach(), sigma, seeds, noise, triton)
    return noisy, drawn if noise is None else noise


def quantise_rows(x: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Values q in float8 e4m3, shape of x, and scales float32 [..., 1] with x about q * scale; not differentiable.

    x [..., K] float32, bfloat16 or float16. The scale of a row is its largest magnitude / 448, the largest value of
    e4m3, and 1 for a row of zeros; values are rounded to nearest, halves to even. A function of the row alone: no row
    depends on another. A NaN or an infinity anywhere makes the products of its row NaN, so that whoever watches for
    them sees them. Raises ValueError for other dtypes, for an empty x, and for K above 32768.
    """
    if x.dtype not in DTYPES or x.ndim == 0 or x.numel() == 0 or x.shape[-1] > MAX_ROW:
        raise ValueError(
            f"x must be [..., K] float32, bfloat16 or float16, not empty, with K at most {MAX_ROW}, got "
            f"{list(x.shape)} {x.dtype}"
        )
    q, scale = library.quantise_rows(x.detach(), use_triton(backend, x[:1]))
    return q, scale
