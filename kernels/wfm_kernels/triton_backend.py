"""The operators by Triton: launch shapes, alignment and workspaces. Same arguments and results as torch_backend.py.

Nothing here waits for the device, is tuned per call or allocates by values, so a CUDA graph can capture every operator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from wfm_kernels import triton_kernels as kernels
from wfm_kernels.torch_backend import E4M3_MAX, LEAST_SCALE, MIN_WEIGHT

BLOCK, WARPS = 2048, 8
NFT_BLOCK, NFT_WARPS = 1024, 4  # eight accumulators: more elements a thread would spill
MAX_SPLIT = 512  # programs per sample: one video alone still fills a GPU
NUM_NFT_SUMS, NUM_NFT_STATS = 8, 7


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All memory that kernels write; the tests fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=device)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, **constants: Any) -> None:
    place = next(arg for arg in args if isinstance(arg, Tensor))
    # Triton launches on the thread's current device, whatever its pointers say; a new thread's is device 0.
    with torch.cuda.device_of(place):  # type: ignore[no-untyped-call]
        # Fusion off: whether the compiler contracts a*b+c may differ between two kernels, and rollout and training
        # would get other bits. These kernels wait for memory, not for arithmetic.
        kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at a multiple of 16 bytes: vector loads, and one order of summation whatever the input."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _aligned_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _aligned(tensor)


def _cut(n: int, block: int) -> tuple[int, int]:
    """(tiles per program, programs per sample) of n elements; of n alone, so that a batch changes no sum."""
    blocks = -(-n // block)
    split = min(MAX_SPLIT, 1 << (blocks - 1).bit_length())
    return -(-blocks // split), split


def _rows(coefficients: Tensor) -> Tensor:
    return coefficients if coefficients.stride(1) == 1 else coefficients.contiguous()


def _sde(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    uncond: Tensor | None,
    guidance: float,
    *,
    out: Tensor,
    given: bool,
    noise: Tensor | None = None,
    seeds: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Runs the shared kernel and returns log_prob [B] of `out`, which is written unless it is given."""
    batch, n = len(latents), latents.numel() // len(latents)
    tiles, split = _cut(n, BLOCK)
    coefficients = _rows(coefficients)
    parts = _empty((batch, split), torch.float32, latents.device)
    _launch(
        kernels.sde_kernel,
        (split, batch),
        _aligned(velocity),
        _aligned_or_none(uncond),
        _aligned(latents),
        out,
        _aligned_or_none(noise),
        seeds,
        mean,
        coefficients,
        parts,
        n,
        coefficients.stride(0),
        float(guidance),
        GIVEN=given,
        TILES=tiles,
        SPLIT=split,
        BLOCK=BLOCK,
        warps=WARPS,
    )
    log_prob = _empty((batch,), torch.float32, latents.device)
    _launch(
        kernels.sde_finish_kernel,
        (batch,),
        parts,
        coefficients,
        log_prob,
        n,
        coefficients.stride(0),
        SPLIT=split,
        warps=1,
    )
    return log_prob


def sde_step(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    seeds: Tensor | None,
    noise: Tensor | None,
    uncond: Tensor | None,
    guidance: float,
    return_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape, device = tuple(latents.shape), latents.device
    moved = _empty(shape, latents.dtype, device)
    mean = _empty(shape if return_mean else (0,), torch.float32, device)
    log_prob = _sde(
        velocity,
        latents,
        coefficients,
        uncond,
        guidance,
        out=moved,
        given=False,
        noise=noise,
        seeds=None if seeds is None else seeds.contiguous(),
        mean=mean if return_mean else None,
    )
    return moved, log_prob, mean


def sde_log_prob(
    velocity: Tensor,
    latents: Tensor,
    next_latents: Tensor,
    coefficients: Tensor,
    uncond: Tensor | None,
    guidance: float,
) -> Tensor:
    return _sde(velocity, latents, coefficients, uncond, guidance, out=_aligned(next_latents), given=True)


def sde_log_prob_backward(
    upstream: Tensor,
    velocity: Tensor,
    latents: Tensor,
    next_latents: Tensor,
    coefficients: Tensor,
    uncond: Tensor | None,
    guidance: float,
    for_velocity: bool,
    for_uncond: bool,
) -> tuple[Tensor, Tensor]:
    batch, n, shape = len(latents), latents.numel() // len(latents), tuple(latents.shape)
    for_uncond = for_uncond and uncond is not None
    other = velocity if uncond is None else uncond
    of_velocity = _empty(shape if for_velocity else (0,), velocity.dtype, latents.device)
    of_uncond = _empty(shape if for_uncond else (0,), other.dtype, latents.device)
    coefficients = _rows(coefficients)
    _launch(
        kernels.sde_gradient_kernel,
        (-(-n // BLOCK), batch),
        upstream,
        _aligned(velocity),
        _aligned_or_none(uncond),
        _aligned(latents),
        _aligned(next_latents),
        coefficients,
        of_velocity if for_velocity else None,
        of_uncond if for_uncond else None,
        n,
        coefficients.stride(0),
        float(guidance),
        BLOCK=BLOCK,
        warps=WARPS,
    )
    return of_velocity, of_uncond


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
    batch, n, device = len(clean), clean.numel() // len(clean), clean.device
    tiles, split = _cut(n, NFT_BLOCK)
    parts = _empty((batch, NUM_NFT_SUMS, split), torch.float32, device)
    _launch(
        kernels.nft_kernel,
        (split, batch),
        _aligned(velocity),
        _aligned(old),
        _aligned(clean),
        _aligned(noise),
        _aligned_or_none(ref),
        sigma.contiguous(),
        parts,
        n,
        float(beta),
        TILES=tiles,
        SPLIT=split,
        BLOCK=NFT_BLOCK,
        warps=NFT_WARPS,
    )
    policy, kl = (_empty((batch,), torch.float32, device) for _ in range(2))
    stats = _empty((NUM_NFT_STATS, batch), torch.float32, device)
    _launch(
        kernels.nft_finish_kernel,
        (batch,),
        parts,
        reward_weight.contiguous(),
        policy,
        kl,
        stats,
        batch,
        n,
        float(beta),
        MIN_WEIGHT=MIN_WEIGHT,
        SPLIT=split,
        warps=1,
    )
    return policy, kl, stats


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
    batch, n = len(clean), clean.numel() // len(clean)
    gradient = _empty(tuple(velocity.shape), velocity.dtype, velocity.device)
    _launch(
        kernels.nft_gradient_kernel,
        (-(-n // BLOCK), batch),
        upstream,
        upstream_kl,
        _aligned(velocity),
        _aligned(old),
        _aligned(clean),
        _aligned(noise),
        _aligned_or_none(ref),
        sigma.contiguous(),
        reward_weight.contiguous(),
        stats,
        gradient,
        batch,
        n,
        float(beta),
        BLOCK=BLOCK,
        warps=WARPS,
    )
    return gradient


def flow_noise(clean: Tensor, sigma: Tensor, seeds: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, n, shape = len(clean), clean.numel() // len(clean), tuple(clean.shape)
    noisy = _empty(shape, clean.dtype, clean.device)
    drawn = _empty((0,) if seeds is None else shape, torch.float32, clean.device)
    _launch(
        kernels.flow_noise_kernel,
        (-(-n // BLOCK), batch),
        _aligned(clean),
        sigma.contiguous(),
        None if seeds is None else seeds.contiguous(),
        drawn if noise is None else _aligned(noise),
        noisy,
        n,
        BLOCK=BLOCK,
        warps=WARPS,
    )
    return noisy, drawn


def row_launch(n: int) -> tuple[int, int]:
    """(BLOCK, warps) of a program that holds a row of n elements: 16 of them in a thread, more in the longest rows."""
    block = max(512, triton.next_power_of_2(n))
    return block, min(16, block // 512)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[-1]
    block, warps = row_launch(n)
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = _empty((*x.shape[:-1], 1), torch.float32, x.device)
    _launch(
        kernels.quantise_rows_kernel,
        (x.numel() // n,),
        _aligned(x),
        q.view(torch.uint8),
        scale,
        n,
        MAX=E4M3_MAX,
        LEAST=LEAST_SCALE,
        BLOCK=block,
        warps=warps,
    )
    return q, scale
