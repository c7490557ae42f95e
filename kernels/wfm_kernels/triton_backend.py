"""Triton backend, with the interface of torch_backend.py. CUDA graphs can capture its operators."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from wfm_kernels import triton_kernels as kernels
from wfm_kernels.torch_backend import E4M3_MAX, MIN_SCALE, MIN_WEIGHT

BLOCK, WARPS = 2048, 8
NFT_BLOCK, NFT_WARPS = 1024, 4  # smaller, because the kernel has eight sums and would otherwise spill registers
MAX_SPLIT = 512  # maximum number of programs per sample; enough to fill a GPU with a single video
NUM_NFT_SUMS, NUM_NFT_STATS = 8, 7


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for the results of kernels. Tests replace this function to fill the memory with NaN."""
    return torch.empty(shape, dtype=dtype, device=device)


def _launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, **constants: Any) -> None:
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    # Triton launches on the thread's current device, not on the device of the tensors. In a new thread, the current
    # device is device 0.
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        # Disable fused multiply-adds. The compiler could fuse a*b+c in one kernel but not in another, and rollout and
        # training would then differ in the last bits. The kernels are memory bound, so this costs no time.
        kernel[grid](*args, **constants, num_warps=warps, enable_fp_fusion=False)


def _align_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if the tensor is not contiguous and 16-byte aligned, as vector loads require."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _align_tensors(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else _align_tensor(tensor) for tensor in tensors]


def _split_sample(n: int, block: int) -> tuple[int, int]:
    """Return (tiles per program, programs per sample) for samples of n elements. Does not depend on the batch size."""
    blocks = -(-n // block)
    split = min(MAX_SPLIT, 1 << (blocks - 1).bit_length())
    return -(-blocks // split), split


def _contiguous_rows(coefficients: Tensor) -> Tensor:
    return coefficients if coefficients.stride(1) == 1 else coefficients.contiguous()


def _run_sde_kernel(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    *,
    out: Tensor,
    given: bool,
    noise: Tensor | None = None,
    seeds: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Return the log-probability of the next latents, one value per sample.

    given: whether `out` contains the next latents. If not, the kernel computes them and writes them to `out`.
    """
    batch, n = len(latents), latents.numel() // len(latents)
    tiles, split = _split_sample(n, BLOCK)
    coefficients = _contiguous_rows(coefficients)
    parts = _empty_tensor((batch, split), torch.float32, latents.device)
    _launch_kernel(
        kernels.sde_kernel,
        (split, batch),
        *_align_tensors(velocity, latents),
        out,  # not aligned: unless `given` is set, the kernel writes it
        *_align_tensors(noise),
        seeds,
        mean,
        coefficients,
        parts,
        n,
        coefficients.stride(0),
        GIVEN=given,
        TILES=tiles,
        SPLIT=split,
        BLOCK=BLOCK,
        warps=WARPS,
    )
    log_prob = _empty_tensor((batch,), torch.float32, latents.device)
    _launch_kernel(
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
    return_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape, device = tuple(latents.shape), latents.device
    next_latents = _empty_tensor(shape, latents.dtype, device)
    mean = _empty_tensor(shape if return_mean else (0,), torch.float32, device)
    log_prob = _run_sde_kernel(
        velocity,
        latents,
        coefficients,
        out=next_latents,
        given=False,
        noise=noise,
        seeds=None if seeds is None else seeds.contiguous(),
        mean=mean if return_mean else None,
    )
    return next_latents, log_prob, mean


def sde_log_prob(velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor) -> Tensor:
    return _run_sde_kernel(velocity, latents, coefficients, out=_align_tensor(next_latents), given=True)


def sde_log_prob_backward(
    upstream: Tensor, velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor
) -> Tensor:
    batch, n = len(latents), latents.numel() // len(latents)
    gradient = _empty_tensor(tuple(latents.shape), velocity.dtype, latents.device)
    coefficients = _contiguous_rows(coefficients)
    _launch_kernel(
        kernels.sde_gradient_kernel,
        (-(-n // BLOCK), batch),
        upstream,
        *_align_tensors(velocity, latents, next_latents),
        coefficients,
        gradient,
        n,
        coefficients.stride(0),
        BLOCK=BLOCK,
        warps=WARPS,
    )
    return gradient


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
    tiles, split = _split_sample(n, NFT_BLOCK)
    parts = _empty_tensor((batch, NUM_NFT_SUMS, split), torch.float32, device)
    _launch_kernel(
        kernels.nft_kernel,
        (split, batch),
        *_align_tensors(velocity, old, clean, noise, ref),
        sigma.contiguous(),
        parts,
        n,
        float(beta),
        TILES=tiles,
        SPLIT=split,
        BLOCK=NFT_BLOCK,
        warps=NFT_WARPS,
    )
    policy, kl = (_empty_tensor((batch,), torch.float32, device) for _ in range(2))
    stats = _empty_tensor((NUM_NFT_STATS, batch), torch.float32, device)
    _launch_kernel(
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
    gradient = _empty_tensor(tuple(velocity.shape), velocity.dtype, velocity.device)
    _launch_kernel(
        kernels.nft_gradient_kernel,
        (-(-n // BLOCK), batch),
        upstream,
        upstream_kl,
        *_align_tensors(velocity, old, clean, noise, ref),
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
    noisy = _empty_tensor(shape, clean.dtype, clean.device)
    new_noise = _empty_tensor((0,) if seeds is None else shape, torch.float32, clean.device)
    _launch_kernel(
        kernels.flow_noise_kernel,
        (-(-n // BLOCK), batch),
        _align_tensor(clean),
        sigma.contiguous(),
        None if seeds is None else seeds.contiguous(),
        new_noise if noise is None else _align_tensor(noise),
        noisy,
        n,
        BLOCK=BLOCK,
        warps=WARPS,
    )
    return noisy, new_noise


def row_launch_shape(n: int) -> tuple[int, int]:
    """Return (block size, warps) for rows of n elements. A thread processes 16 elements, or more in long rows."""
    block = max(512, triton.next_power_of_2(n))
    return block, min(16, block // 512)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[-1]
    block, warps = row_launch_shape(n)
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = _empty_tensor((*x.shape[:-1], 1), torch.float32, x.device)
    _launch_kernel(
        kernels.quantise_rows_kernel,
        (x.numel() // n,),
        _align_tensor(x),
        q.view(torch.uint8),
        scale,
        n,
        MAX=E4M3_MAX,
        LEAST=MIN_SCALE,
        BLOCK=block,
        warps=warps,
    )
    return q, scale
