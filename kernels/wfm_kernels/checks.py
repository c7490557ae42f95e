"""Validation of shapes and dtypes. Values are not checked, because reading them would synchronize with the device."""

from __future__ import annotations

import torch
from torch import Tensor

from wfm_kernels.torch_backend import EXACT_DTYPE, working_dtype

LATENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_latents(**latents: Tensor | None) -> None:
    """Raise ValueError unless all tensors are non-empty [B, ...] of one shape and valid dtypes. None is skipped."""
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
    """Raise ValueError unless each tensor is [B] float32 (float64 for float64 latents), with B as in the latents."""
    for name, tensor in vectors.items():
        if tensor.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [{len(latents)}], one value per sample, got {list(tensor.shape)}")
    require_floating(latents, **vectors)


def require_floating(latents: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless each tensor is float32 (float64 for float64 latents)."""
    for name, tensor in tensors.items():
        if tensor.dtype != working_dtype(latents):
            raise ValueError(f"{name} must be {working_dtype(latents)}, got {tensor.dtype}")


def require_coefficients(coefficients: Tensor, latents: Tensor) -> None:
    """Raise ValueError unless the coefficients are [B,5] float64: one row of `sde_coefficients` per sample."""
    if coefficients.shape != (len(latents), 5) or coefficients.dtype != torch.float64:
        raise ValueError(
            f"coefficients must be [{len(latents)}, 5] float64, one row of sde_coefficients per sample, got "
            f"{list(coefficients.shape)} {coefficients.dtype}"
        )


def require_one_source(latents: Tensor, seeds: Tensor | None, noise: Tensor | None) -> None:
    """Raise ValueError unless exactly one of noise and seeds is given, with one int64 seed per sample."""
    if (seeds is None) == (noise is None):
        raise ValueError(f"give either seeds or noise, got {'neither' if seeds is None else 'both'}")
    if seeds is not None and (seeds.shape != latents.shape[:1] or seeds.dtype != torch.int64):
        raise ValueError(f"seeds must be [{len(latents)}] int64, got {list(seeds.shape)} {seeds.dtype}")
