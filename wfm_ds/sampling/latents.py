"""Latents: shape checks, noise from each sample's seed, masks, and per-sample means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import ConditioningFrames
from wfm_kernels import flow_noise

# Training uses float32; tests of formulas use float64. Half precision and integers would silently lose precision.
ALLOWED_DTYPES = (torch.float32, torch.float64)
LATENT_NDIMS = (2, 4, 5)  # several streams as one vector per sample, images, videos


def require_latents(**latents: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape and dtype.

    The shape must be [B,N], [B,C,h,w] or [B,C,T,h,w], and the dtype float32 or float64.
    """
    first = next(iter(latents.values()))
    for name, tensor in latents.items():
        if tensor.ndim not in LATENT_NDIMS or tensor.numel() == 0:
            raise ValueError(f"{name} must be a non-empty [B,N], [B,C,h,w] or [B,C,T,h,w], got {list(tensor.shape)}")
        if tensor.dtype not in ALLOWED_DTYPES or tensor.dtype != first.dtype:
            raise ValueError(f"{', '.join(latents)} must all be float32, {name} is {tensor.dtype}")
    if len({tensor.shape for tensor in latents.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in latents.items())
        raise ValueError(f"latents must have the same shape, got {shapes}")


def require_vectors(latents: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError unless each vector is [B] with the dtype of `latents`."""
    for name, tensor in vectors.items():
        if tensor.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [{len(latents)}], one value per sample, got {list(tensor.shape)}")
        if tensor.dtype != latents.dtype:
            raise ValueError(f"{name} must be {latents.dtype} like the latents, got {tensor.dtype}")


def free_frame_mask(frames: ConditioningFrames) -> Tensor:
    """Return a float32 mask [B,1,T,1,1], on the device of `frames`: 0 on conditioning frames, 1 on other frames."""
    positions = torch.arange(frames.latents.shape[2], device=frames.latents.device)
    counts = copy_to_device(frames.counts, frames.latents.device)
    return (positions >= counts[:, None]).float().view(len(counts), 1, -1, 1, 1)


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Weights of several streams in the mean over the elements of latents [B,N]. The weights add up to 1."""

    sizes: tuple[int, ...]  # elements of each stream, in the order of the latents
    weights: tuple[float, ...]

    def element_weights(self, device: torch.device | str) -> Tensor:
        """Return the `mask` of `sample_mean` for the weighted mean over the streams: float32 [1,N] with mean 1."""
        count = sum(self.sizes)
        return torch.cat(
            [
                torch.full((1, size), weight * count / size, device=device)
                for size, weight in zip(self.sizes, self.weights, strict=True)
            ],
            dim=1,
        )

    def split(self, latents: Tensor) -> list[Tensor]:
        """Split latents [B,N] into one tensor [B, size] per stream."""
        return list(torch.split(latents, list(self.sizes), dim=1))


def sample_mean(tensor: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over each sample's elements, [B].

    mask: weights of the elements, such as 1 for elements that count, else 0; broadcast to the samples.
    """
    if mask is None:
        return tensor.flatten(1).mean(1)
    mask = mask.expand_as(tensor).flatten(1)
    return (tensor.flatten(1) * mask).sum(1) / mask.sum(1)


def draw_cpu_normal(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal noise [B, *shape], float32 on `device`. Sample i depends only on seeds[i] and shape.

    Equals the noise that a diffusers pipeline with a float32 denoiser draws from
    `[torch.Generator("cpu").manual_seed(s) for s in seeds]`. seeds: in [0, 2**63); torch's CPU generator uses only
    their low 32 bits. Raises ValueError if `seeds` is empty.
    """
    if not seeds:
        raise ValueError("seeds is empty: pass at least one seed")
    # diffusers draws each sample of a batch with a leading dimension of 1.
    draws = [
        torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)
        for seed in seeds
    ]
    return copy_to_device(torch.cat(draws), device)


def draw_device_normal(seeds: Tensor, like: Tensor) -> Tensor:
    """Return standard normal noise with the shape [B, ...], dtype and device of `like`.

    Sample i depends only on seeds[i].

    seeds: [B] int64 on the device of `like`. Does not synchronize with the device.
    """
    return flow_noise(like, torch.zeros(len(like), dtype=like.dtype, device=like.device), seeds=seeds)[1].to(like.dtype)


def add_noise(clean_latents: Tensor, sigma: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw noise and return (noisy latents, noise). The noise of sample i depends only on seeds[i].

    sigma: [B]. seeds: in [0, 2**63).
    """
    require_latents(clean_latents=clean_latents)
    require_vectors(clean_latents, sigma=sigma)
    device_seeds = copy_to_device(torch.tensor(seeds, dtype=torch.int64), clean_latents.device)
    return flow_noise(clean_latents, sigma, seeds=device_seeds)


def noisy_latents(clean_latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1-sigma)*x0 + sigma*eps with x0 = clean_latents and eps = noise.

    Latents and noise are float32 [B,N], [B,C,h,w] or [B,C,T,h,w]; sigma is [B]. Raises ValueError for other shapes and
    dtypes.
    """
    require_latents(clean_latents=clean_latents, noise=noise)
    require_vectors(clean_latents, sigma=sigma)
    return flow_noise(clean_latents, sigma, noise=noise)[0]
