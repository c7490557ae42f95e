"""Noise that depends only on each sample's seed, and noisy latents.

Initial noise equals the noise that diffusers draws on the CPU from the same seed. All other noise is drawn on the
device of the latents (noise contract of wfm_kernels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wfm_ds.pinned_memory import copy_to_device
from wfm_ds.sampling.shapes import require_latents, require_vectors
from wfm_kernels import flow_noise


def draw_cpu_normal(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal noise [B, *shape], float32 on `device`. Sample i depends only on seeds[i] and shape.

    Drawn on the CPU, exactly as a diffusers pipeline with a float32 denoiser does with
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
    """Return standard normal noise with the shape [B, ...], dtype and device of `like`. Sample i depends on seeds[i].

    seeds: [B] int64 on the device of `like`. Drawn there without host synchronization (wfm_kernels noise contract).
    """
    return flow_noise(like, torch.zeros(len(like), dtype=like.dtype, device=like.device), seeds=seeds)[1].to(like.dtype)


def add_noise(clean_latents: Tensor, sigma: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw noise and return (noisy latents, noise). The noise of sample i depends only on seeds[i], in [0, 2**63)."""
    require_latents(clean_latents=clean_latents)
    require_vectors(clean_latents, sigma=sigma)
    device_seeds = copy_to_device(torch.tensor(seeds, dtype=torch.int64), clean_latents.device)
    return flow_noise(clean_latents, sigma, seeds=device_seeds)


def noisy_latents(clean_latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1-sigma)*x0 + sigma*eps for float32 [B,C,h,w] or [B,C,T,h,w] and sigma [B]; else raise ValueError."""
    require_latents(clean_latents=clean_latents, noise=noise)
    require_vectors(clean_latents, sigma=sigma)
    return flow_noise(clean_latents, sigma, noise=noise)[0]
