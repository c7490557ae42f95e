"""Shape and dtype checks of latents, masks of conditioning frames, and per-sample means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.pinned_memory import copy_to_device

if TYPE_CHECKING:
    from wfm_ds.types import ConditioningFrames

# Training uses float32; tests of formulas use float64. Half precision and integers would silently lose precision.
ALLOWED_DTYPES = (torch.float32, torch.float64)


def require_latents(**latents: Tensor) -> None:
    """Raise ValueError unless all tensors are [B,C,h,w] or [B,C,T,h,w] of one shape, all float32 or all float64."""
    first = next(iter(latents.values()))
    for name, tensor in latents.items():
        if tensor.ndim not in (4, 5) or tensor.numel() == 0:
            raise ValueError(f"{name} must be a non-empty [B,C,h,w] or [B,C,T,h,w], got {list(tensor.shape)}")
        if tensor.dtype not in ALLOWED_DTYPES or tensor.dtype != first.dtype:
            raise ValueError(f"{', '.join(latents)} must all be float32, {name} is {tensor.dtype}")
    if len({tensor.shape for tensor in latents.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in latents.items())
        raise ValueError(f"latents must have the same shape, got {shapes}")


def require_vectors(latents: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError unless each vector is [B] with the dtype of `latents`. [B, 1] would broadcast to [B, B]."""
    for name, tensor in vectors.items():
        if tensor.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [{len(latents)}], one value per sample, got {list(tensor.shape)}")
        if tensor.dtype != latents.dtype:
            raise ValueError(f"{name} must be {latents.dtype} like the latents, got {tensor.dtype}")


def free_frame_mask(frames: ConditioningFrames) -> Tensor:
    """Return a mask [B,1,T,1,1], float32 on the device of the latents: 0 on conditioning frames, 1 elsewhere."""
    positions = torch.arange(frames.latents.shape[2], device=frames.latents.device)
    counts = copy_to_device(frames.counts, frames.latents.device)
    return (positions >= counts[:, None]).float().view(len(counts), 1, -1, 1, 1)


def sample_mean(tensor: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over each sample's elements, [B]. mask: 1 for elements that count, else 0; broadcastable."""
    if mask is None:
        return tensor.flatten(1).mean(1)
    mask = mask.expand_as(tensor).flatten(1)
    return (tensor.flatten(1) * mask).sum(1) / mask.sum(1)
