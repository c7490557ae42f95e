"""Registers the torch operators `wfm_kernels::*`, which torch.compile and CUDA graphs treat as opaque nodes.

The operators do not validate arguments. An optional result that was not requested is an empty tensor.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wfm_kernels import torch_backend
from wfm_kernels.torch_backend import working_dtype

NFT_STATS = (  # rows of the third result of nft_loss; the last one is valid only with a reference
    "loss_positive",
    "loss_negative",
    "weight_positive",
    "weight_negative",
    "old_deviation",
    "old_deviation_max",
    "old_ref_deviation",
)


def _backend_module(triton: bool) -> ModuleType:
    if triton:
        from wfm_kernels import triton_backend  # local import: Triton is missing on most machines without a GPU

        return triton_backend
    return torch_backend


def _empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_per_sample(latents: Tensor, *rows: int) -> Tensor:
    return latents.new_empty((*rows, latents.shape[0]), dtype=working_dtype(latents))


@torch.library.custom_op("wfm_kernels::sde_step", mutates_args=())
def sde_step(
    velocity: Tensor,
    latents: Tensor,
    coefficients: Tensor,
    seeds: Tensor | None,
    noise: Tensor | None,
    uncond: Tensor | None,
    guidance: float,
    return_mean: bool,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    next_latents, log_prob, mean = _backend_module(triton).sde_step(
        velocity, latents, coefficients, seeds, noise, uncond, guidance, return_mean
    )
    return next_latents, log_prob, mean


@sde_step.register_fake
def _(velocity: Tensor, latents: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype, return_mean = working_dtype(latents), arguments[-2]
    mean = _empty_like(latents, dtype) if return_mean else latents.new_empty(0, dtype=dtype)
    return _empty_like(latents), _empty_per_sample(latents), mean


@torch.library.custom_op("wfm_kernels::sde_log_prob", mutates_args=())
def sde_log_prob(
    velocity: Tensor,
    latents: Tensor,
    next_latents: Tensor,
    coefficients: Tensor,
    uncond: Tensor | None,
    guidance: float,
    triton: bool,
) -> Tensor:
    log_prob: Tensor = _backend_module(triton).sde_log_prob(
        velocity, latents, next_latents, coefficients, uncond, guidance
    )
    return log_prob


@sde_log_prob.register_fake
def _(velocity: Tensor, latents: Tensor, *_: Any) -> Tensor:
    return _empty_per_sample(latents)


@torch.library.custom_op("wfm_kernels::sde_log_prob_backward", mutates_args=())
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
    triton: bool,
) -> tuple[Tensor, Tensor]:
    grad_velocity, grad_uncond = _backend_module(triton).sde_log_prob_backward(
        upstream, velocity, latents, next_latents, coefficients, uncond, guidance, for_velocity, for_uncond
    )
    return grad_velocity, grad_uncond


@sde_log_prob_backward.register_fake
def _(upstream: Tensor, velocity: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    uncond, _guidance, for_velocity, for_uncond, _triton = arguments[3:]
    other = velocity if uncond is None else uncond
    return (
        _empty_like(velocity) if for_velocity else velocity.new_empty(0),
        _empty_like(other) if for_uncond and uncond is not None else other.new_empty(0),
    )


def _save_for_log_prob(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, guidance, triton = inputs
    ctx.save_for_backward(*tensors)
    ctx.guidance, ctx.triton = guidance, triton


def _log_prob_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    needs_velocity, needs_uncond = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    grad_velocity, grad_uncond = sde_log_prob_backward(
        upstream.contiguous(), *ctx.saved_tensors, ctx.guidance, needs_velocity, needs_uncond, ctx.triton
    )
    uncond_result = grad_uncond if needs_uncond else None
    return grad_velocity if needs_velocity else None, None, None, None, uncond_result, None, None


sde_log_prob.register_autograd(_log_prob_gradients, setup_context=_save_for_log_prob)


@torch.library.custom_op("wfm_kernels::nft_loss", mutates_args=())
def nft_loss(
    velocity: Tensor,
    old: Tensor,
    clean: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    ref: Tensor | None,
    beta: float,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    policy, kl, stats = _backend_module(triton).nft_loss(velocity, old, clean, noise, sigma, reward_weight, ref, beta)
    return policy, kl, stats


@nft_loss.register_fake
def _(velocity: Tensor, old: Tensor, clean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_per_sample(clean), _empty_per_sample(clean), _empty_per_sample(clean, len(NFT_STATS))


@torch.library.custom_op("wfm_kernels::nft_loss_backward", mutates_args=())
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
    triton: bool,
) -> Tensor:
    gradient: Tensor = _backend_module(triton).nft_loss_backward(
        upstream, upstream_kl, velocity, old, clean, noise, sigma, reward_weight, ref, stats, beta
    )
    return gradient


@nft_loss_backward.register_fake
def _(upstream: Tensor, upstream_kl: Tensor | None, velocity: Tensor, *_: Any) -> Tensor:
    return _empty_like(velocity)


def _save_for_nft(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, beta, triton = inputs
    ctx.set_materialize_grads(False)  # pass None instead of zeros for unused results
    ctx.save_for_backward(*tensors, output[2])
    ctx.beta, ctx.triton = beta, triton


def _nft_gradients(
    ctx: Any, upstream: Tensor | None, upstream_kl: Tensor | None, _stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, stats = ctx.saved_tensors
    with_ref = tensors[-1] is not None
    gradient = nft_loss_backward(
        _gradient_or_zeros(upstream, stats),
        _gradient_or_zeros(upstream_kl, stats) if with_ref else None,
        *tensors,
        stats,
        ctx.beta,
        ctx.triton,
    )
    return gradient, *[None] * 8


def _gradient_or_zeros(upstream: Tensor | None, stats: Tensor) -> Tensor:
    return torch.zeros_like(stats[0]) if upstream is None else upstream.contiguous()


nft_loss.register_autograd(_nft_gradients, setup_context=_save_for_nft)


@torch.library.custom_op("wfm_kernels::flow_noise", mutates_args=())
def flow_noise(
    clean: Tensor, sigma: Tensor, seeds: Tensor | None, noise: Tensor | None, triton: bool
) -> tuple[Tensor, Tensor]:
    noisy, new_noise = _backend_module(triton).flow_noise(clean, sigma, seeds, noise)
    return noisy, new_noise


@flow_noise.register_fake
def _(clean: Tensor, sigma: Tensor, seeds: Tensor | None, noise: Tensor | None, triton: bool) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(clean)
    return _empty_like(clean), clean.new_empty(0, dtype=dtype) if seeds is None else _empty_like(clean, dtype)


@torch.library.custom_op("wfm_kernels::quantise_rows", mutates_args=())
def quantise_rows(x: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    q, scale = _backend_module(triton).quantise_rows(x)
    return q, scale


@quantise_rows.register_fake
def _(x: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    return _empty_like(x, torch.float8_e4m3fn), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
