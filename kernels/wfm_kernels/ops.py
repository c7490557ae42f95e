"""The public operators. They check shapes, dtypes and devices of arguments, but not values, and select a backend."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from wfm_kernels import library
from wfm_kernels.torch_backend import EXACT_DTYPE, working_dtype

log = logging.getLogger(__name__)

LATENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Backend: TypeAlias = Literal["auto", "triton", "torch"]
BACKEND_NAMES = ("auto", "triton", "torch")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
MAX_SAMPLES = 65_535  # maximum size of the second dimension of a launch grid
# Element indices are int32. The last program of a sample may compute indices up to one grid of tiles past its end.
MAX_ELEMENTS = 2**31 - 2**21
MAX_ROW = 32_768  # maximum number of elements of a row, which one program of quantise_rows holds in registers


def require_latents(**latents: Tensor | None) -> None:
    """Raise ValueError unless all tensors have the same shape [batch, ...], at least one element, and supported dtypes.

    Arguments that are None are not checked.
    """
    present = {name: tensor for name, tensor in latents.items() if tensor is not None}
    for name, tensor in present.items():
        if tensor.dtype not in (*LATENT_DTYPES, EXACT_DTYPE):
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.ndim < 2 or tensor.numel() == 0:
            raise ValueError(f"{name} must be [B, ...] and not empty, got {list(tensor.shape)}")
    if len({tensor.shape for tensor in present.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in present.items())
        raise ValueError(f"the latents must have one shape, got {shapes}")
    if len({tensor.dtype == EXACT_DTYPE for tensor in present.values()}) > 1:
        raise ValueError("either all latents or none must be float64 (float64 is for verifying formulas)")


def require_vectors(latents: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError unless each tensor is float32 [batch] (float64 if the latents are float64)."""
    for name, tensor in vectors.items():
        if tensor.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [{len(latents)}], one value per sample, got {list(tensor.shape)}")
    require_floating(latents, **vectors)


def require_floating(latents: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor is float32 (float64 if the latents are float64)."""
    for name, tensor in tensors.items():
        if tensor.dtype != working_dtype(latents):
            raise ValueError(f"{name} must be {working_dtype(latents)}, got {tensor.dtype}")


def require_coefficients(coefficients: Tensor, latents: Tensor) -> None:
    """Raise ValueError unless the coefficients are float64 [batch, 5], as from `sde_coefficients`."""
    if coefficients.shape != (len(latents), 5) or coefficients.dtype != torch.float64:
        raise ValueError(
            f"coefficients must be [{len(latents)}, 5] float64, one row of sde_coefficients per sample, got "
            f"{list(coefficients.shape)} {coefficients.dtype}"
        )


def require_one_source(latents: Tensor, seeds: Tensor | None, noise: Tensor | None) -> None:
    """Raise ValueError unless exactly one of noise and seeds is given. Seeds must be int64 [batch]."""
    if (seeds is None) == (noise is None):
        raise ValueError(f"give either seeds or noise, got {'neither' if seeds is None else 'both'}")
    if seeds is not None and (seeds.shape != latents.shape[:1] or seeds.dtype != torch.int64):
        raise ValueError(f"seeds must be [{len(latents)}] int64, got {list(seeds.shape)} {seeds.dtype}")


def should_use_triton(backend: Backend, latents: Tensor, *others: Tensor | None) -> bool:
    """Return whether to use the Triton backend. The environment variable WFM_KERNELS overrides `backend`.

    `auto` selects Triton for CUDA tensors if Triton can run, and otherwise torch. Raises ValueError for an unknown
    name, for tensors on several devices, and if `triton` is requested but Triton cannot run.
    """
    tensors = [latents, *(tensor for tensor in others if tensor is not None)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    name = _resolve_backend(backend)
    if name == "torch" or (name == "auto" and latents.device.type != "cuda"):
        return False
    obstacle = _find_obstacle(latents, tensors)
    if obstacle and name == "triton":
        raise ValueError(f"the triton backend cannot run: {obstacle}")
    if obstacle and not torch.compiler.is_compiling():  # a traced call cannot log
        _warn_once(obstacle)
    return obstacle is None


def _resolve_backend(backend: str) -> Backend:
    name = os.environ.get("WFM_KERNELS", "") or backend
    if name not in BACKEND_NAMES:
        raise ValueError(f"unknown kernel backend {name!r}; choose one of {', '.join(BACKEND_NAMES)}")
    return cast(Backend, name)


def _find_obstacle(latents: Tensor, tensors: list[Tensor]) -> str | None:
    n = latents.numel() // len(latents)
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if latents.device.type != "cuda" and not is_interpreted():
        return f"the tensors are on {latents.device}, not on CUDA (tests use TRITON_INTERPRET=1)"
    if any(tensor.dtype == EXACT_DTYPE and tensor.shape == latents.shape for tensor in tensors):
        return "latents are float64"
    if n > MAX_ELEMENTS or len(latents) > MAX_SAMPLES:
        return f"{len(latents)} samples of {n} elements exceed the limit of {MAX_SAMPLES} samples of {MAX_ELEMENTS}"
    return None


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels in Python (TRITON_INTERPRET=1, set before importing the kernels)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _warn_once(obstacle: str) -> None:
    log.warning("fused kernels are disabled, using eager torch: %s", obstacle)


@dataclass(frozen=True, slots=True)
class SdeStep:
    """Result of `sde_step`. All tensors are detached."""

    next_latents: Tensor  # shape and dtype of the latents
    log_prob: Tensor  # [B] float32, log-probability of the rounded next_latents
    mean: Tensor | None  # float32, shape of the latents; None without return_mean


@dataclass(frozen=True, slots=True)
class NftLoss:
    """DiffusionNFT losses and statistics. Each tensor is float32 with one value per sample."""

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
    return_mean: bool = False,
    backend: Backend = "auto",
) -> SdeStep:
    """Run one denoising step of a sampler in sde_coefficients. Return the next latents and their log-probability.

    velocity, latents: same shape [B, ...] for B samples, each float32, bfloat16 or float16.
    coefficients: [B,5] float64, one row of sde_coefficients per sample. A single row may be expanded to B rows.
    seeds, noise: pass exactly one of them. seeds: [B] int64 (see torch_backend). noise: shape of the latents. Both are
    ignored for samples with a std (coefficient) of 0.

    log_prob is computed from the next latents after rounding to the latents' dtype, so sde_log_prob returns the same
    bits. Not differentiable. Raises ValueError for invalid arguments.
    """
    require_latents(velocity=velocity, latents=latents, noise=noise)
    require_coefficients(coefficients, latents)
    require_one_source(latents, seeds, noise)
    latents = latents.detach()
    triton = should_use_triton(backend, latents, velocity, coefficients, seeds, noise)
    next_latents, log_prob, mean = library.sde_step(
        velocity.detach(),
        latents,
        coefficients,
        seeds,
        None if noise is None else noise.detach(),
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
    backend: Backend = "auto",
) -> Tensor:
    """Return the log-probability of steps from latents to next_latents, averaged over the elements of each sample.

    The result is float32 [B] for B samples. For the arguments, see sde_step, which returns the same bits if the
    velocities have the same dtype.
    Differentiable once, with respect to velocity. For a float16 velocity, scale the loss, because the gradient would
    otherwise be subnormal. Raises ValueError for invalid arguments.
    """
    require_latents(velocity=velocity, latents=latents, next_latents=next_latents)
    require_coefficients(coefficients, latents)
    triton = should_use_triton(backend, latents, velocity, next_latents, coefficients)
    log_prob: Tensor = library.sde_log_prob(velocity, latents.detach(), next_latents.detach(), coefficients, triton)
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
    """Return the DiffusionNFT loss (arXiv 2509.16117) of each sample: policy loss, KL to a reference, and statistics.

    Latents, noise and velocities: same shape [B, ...] for B samples, each float32, bfloat16 or float16.
    sigma, reward_weight: [B] float32. reward_weight must be in [0, 1]. This is not checked.

    The formulas use v = velocity, v_old = old_velocity, v_ref = ref_velocity, r = reward_weight, u = noise -
    clean_latents, and the mean over the elements of a sample:

        e = sigma * (u - v_old)         d = sigma * beta * (v - v_old)      p = e - d       q = e + d
        w_p = max(mean(abs(p)), 1e-5)   w_q = max(mean(abs(q)), 1e-5)       (both without gradient)
        policy = (r * mean(p^2) / w_p + (1 - r) * mean(q^2) / w_q) / beta   kl = mean((v - v_ref)^2)

    p and q are the x0 errors of the paper. The loss is differentiable once, with respect to velocity only.

    stats contains loss_positive = mean(p^2) / w_p, loss_negative = mean(q^2) / w_q, weight_positive = w_p,
    weight_negative = w_q, old_deviation and old_deviation_max (mean and maximum of (v - v_old)^2) and, with a
    reference, old_ref_deviation (mean of (v_old - v_ref)^2). Raises ValueError for invalid shapes and dtypes, and for
    beta <= 0.
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
    """Return (noisy latents, noise). Noisy latents are (1 - sigma) * clean_latents + sigma * noise. Not differentiable.

    clean_latents: [B, ...] float32, bfloat16 or float16. Noisy latents have the same dtype. sigma: [B] float32.
    seeds, noise: pass exactly one of them. seeds: [B] int64 (see torch_backend). noise: float32, shape of the latents.
    Raises ValueError for invalid arguments.
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
    """Quantize each row of x to float8 e4m3. Return (q, scale) such that x is approximately q * scale.

    x: [..., row length] float32, bfloat16 or float16. q: shape of x. scale: float32 [..., 1].
    The scale of a row is the row's largest magnitude divided by 448 (the maximum of e4m3), or 1 for a row of zeros.
    Values are rounded to nearest even. Matrix products with a row that contains NaN or infinity are NaN. Not
    differentiable. Raises ValueError for other dtypes, an empty x, or rows longer than 32768.
    """
    if x.dtype not in LATENT_DTYPES or x.ndim == 0 or x.numel() == 0 or x.shape[-1] > MAX_ROW:
        raise ValueError(
            f"x must be [..., K] float32, bfloat16 or float16, not empty, with K at most {MAX_ROW}, got "
            f"{list(x.shape)} {x.dtype}"
        )
    q, scale = library.quantise_rows(x.detach(), should_use_triton(backend, x[:1]))
    return q, scale
