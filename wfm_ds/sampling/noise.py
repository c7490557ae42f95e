"""Noise as a function of each sample's seed alone, and latents with noise.

Initial noise is what plain diffusers draws from a seed, on the CPU; all other noise is drawn where it is needed, by the
noise contract of wfm_kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wfm_ds.pinned import on_device
from wfm_ds.sampling.shapes import require_latents, require_vectors
from wfm_kernels import flow_noise


def seeded_normal(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal noise [B, *shape] float32 on `device`, sample i a function of seeds[i] and shape alone.

    seeds: in [0, 2**63), of which torch's CPU generator keeps the low 32 bits: seeds equal there draw the same.

    Drawn on the CPU as a diffusers pipeline with a float32 denoiser draws it from the generators
    `[torch.Generator("cpu").manual_seed(s) for s in seeds]`: neither the batch nor the device changes the picture.
    Raises ValueError without seeds.
    """
    if not seeds:
        raise ValueError("noise for no samples: at least one seed is needed")
    # The leading 1 is diffusers' own shape for one sample of a batch.
    draws = [
        torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)
        for seed in seeds
    ]
    return on_device(torch.cat(draws), device)


def drawn_normal(seeds: Tensor, like: Tensor) -> Tensor:
    """Standard normal noise in the shape, dtype and device of `like` [B, ...], sample i a function of seeds[i] alone.

    seeds [B] int64 on that device. Drawn there, by the noise contract of wfm_kernels: nothing waits for it.
    """
    return flow_noise(like, torch.zeros(len(like), dtype=like.dtype, device=like.device), seeds=seeds)[1].to(like.dtype)


def noised(clean_latents: Tensor, sigma: Tensor, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`noisy_latents` with noise drawn for them, and that noise: sample i's is a function of seeds[i] alone, in
    [0, 2**63). Drawn on their device in one kernel, by the noise contract of wfm_kernels."""
    require_latents(clean_latents=clean_latents)
    require_vectors(clean_latents, sigma=sigma)
    drawn = on_device(torch.tensor(seeds, dtype=torch.int64), clean_latents.device)
    return flow_noise(clean_latents, sigma, seeds=drawn)


def noisy_latents(clean_latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_s = (1-sigma)*x0 + sigma*eps, float32, shape of the latents ([B,C,h,w] or [B,C,T,h,w]); sigma [B] float32.

    Raises ValueError for other shapes and dtypes.
    """
    require_latents(clean_latents=clean_latents, noise=noise)
    require_vectors(clean_latents, sigma=sigma)
    return flow_noise(clean_latents, sigma, noise=noise)[0]
