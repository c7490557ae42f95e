"""Checks and sums that noising and losses share: refusal of tensors that do not belong together, and the mean of a
sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.pinned import on_device

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames

# float64 is for checking formulas; training is float32. Half precision and integers would lose digits silently.
DTYPES = (torch.float32, torch.float64)


def require_latents(**latents: Tensor) -> None:
    """Raises ValueError unless all are [B,C,h,w] or [B,C,T,h,w], of one shape, and all float32 (or all float64)."""
    first = next(iter(latents.values()))
    for name, tensor in latents.items():
        if tensor.ndim not in (4, 5) or tensor.numel() == 0:
            raise ValueError(f"{name} must be [B,C,h,w] or [B,C,T,h,w] and not empty, got {list(tensor.shape)}")
        if tensor.dtype not in DTYPES or tensor.dtype != first.dtype:
            raise ValueError(f"{', '.join(latents)} must all be float32, {name} is {tensor.dtype}")
    if len({tensor.shape for tensor in latents.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in latents.items())
        raise ValueError(f"the latents must have one shape, got {shapes}")


def require_vectors(latents: Tensor, **vectors: Tensor) -> None:
    """Raises ValueError unless each is [B] and of the dtype of `latents`, whose first dimension is B.

    A [B, 1] broadcasts against [B] to [B, B], whose mean gives every sample the average credit of its batch.
    """
    for name, tensor in vectors.items():
        if tensor.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [{len(latents)}], one value per sample, got {list(tensor.shape)}")
        if tensor.dtype != latents.dtype:
            raise ValueError(f"{name} must be {latents.dtype} like the latents, got {tensor.dtype}")


def free_frames(frames: ConditionalFrames) -> Tensor:
    """[B,1,T,1,1] float32 on the device of the latents: 0 on conditional frames, 1 elsewhere."""
    places = torch.arange(frames.latents.shape[2], device=frames.latents.device)
    counts = on_device(frames.counts, frames.latents.device)
    return (places >= counts[:, None]).float().view(len(counts), 1, -1, 1, 1)


def sample_mean(tensor: Tensor, free: Tensor | None = None) -> Tensor:
    """[B]: the mean over the elements of each sample, never over samples.

    free: 1 where an element counts and 0 elsewhere, in the tensor's dtype and a shape that broadcasts to its; every
    sample has some that count.
    """
    if free is None:
        return tensor.flatten(1).mean(1)
    free = free.expand_as(tensor).flatten(1)
    return (tensor.flatten(1) * free).sum(1) / free.sum(1)
