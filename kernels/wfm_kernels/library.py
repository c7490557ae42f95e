"""Registers the torch operators `wfm_kernels::*`, which torch.compile and CUDA graphs treat as opaque nodes.

The operators do not validate arguments. An optional result that was not requested is an empty tensor.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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
TRITON_BACKEND = "wfm_kernels.triton_backend"


def define_operator(function: Callable[..., Any], triton_module: str = TRITON_BACKEND) -> Callable[..., Any]:
    """Return a decorator that registers a function of a torch backend as an operator.

    The operator has the arguments of the function and a last one, `triton`: whether to call the function of the same
    name in `triton_module` instead. The decorated function gets the same arguments and returns empty results of the
    right shapes and dtypes, for torch.compile.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=()).replace(") ->", ", bool triton) ->", 1)

    def call_backend(*arguments: Any) -> Any:
        *inputs, triton = arguments
        # Triton is missing on most machines without a GPU, so its module is imported at the first use.
        module = importlib.import_module(triton_module) if triton else sys.modules[function.__module__]
        return getattr(module, name)(*inputs)

    def register(make_empty: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"wfm_kernels::{name}", call_backend, mutates_args=(), schema=schema)
        operator.register_fake(make_empty)
        return operator

    return register


def _empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_per_sample(latents: Tensor, *rows: int) -> Tensor:
    return latents.new_empty((*rows, latents.shape[0]), dtype=working_dtype(latents))


@define_operator(torch_backend.sde_step)
def sde_step(velocity: Tensor, latents: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype, return_mean = working_dtype(latents), arguments[-2]
    mean = _empty_like(latents, dtype) if return_mean else latents.new_empty(0, dtype=dtype)
    return _empty_like(latents), _empty_per_sample(latents), mean


@define_operator(torch_backend.sde_log_prob)
def sde_log_prob(velocity: Tensor, latents: Tensor, *_: Any) -> Tensor:
    return _empty_per_sample(latents)


@define_operator(torch_backend.sde_log_prob_backward)
def sde_log_prob_backward(upstream: Tensor, velocity: Tensor, *_: Any) -> Tensor:
    return _empty_like(velocity)


def _save_for_log_prob(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.triton = inputs
    ctx.save_for_backward(*tensors)


def _log_prob_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return sde_log_prob_backward(upstream.contiguous(), *ctx.saved_tensors, ctx.triton), None, None, None, None


sde_log_prob.register_autograd(_log_prob_gradients, setup_context=_save_for_log_prob)


@define_operator(torch_backend.nft_loss)
def nft_loss(velocity: Tensor, old: Tensor, clean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_per_sample(clean), _empty_per_sample(clean), _empty_per_sample(clean, len(NFT_STATS))


@define_operator(torch_backend.nft_loss_backward)
def nft_loss_backward(upstream: Tensor, upstream_kl: Tensor | None, velocity: Tensor, *_: Any) -> Tensor:
    return _empty_like(velocity)


def _save_for_nft(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.beta, ctx.triton = inputs
    ctx.set_materialize_grads(False)  # pass None instead of zeros for unused results
    ctx.save_for_backward(*tensors, output[2])


def _nft_gradients(
    ctx: Any, upstream: Tensor | None, upstream_kl: Tensor | None, _stats: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, stats = ctx.saved_tensors
    upstream = _gradient_or_zeros(upstream, stats)
    upstream_kl = None if tensors[-1] is None else _gradient_or_zeros(upstream_kl, stats)  # None without a reference
    return nft_loss_backward(upstream, upstream_kl, *tensors, stats, ctx.beta, ctx.triton), *[None] * 8


def _gradient_or_zeros(upstream: Tensor | None, stats: Tensor) -> Tensor:
    return torch.zeros_like(stats[0]) if upstream is None else upstream.contiguous()


nft_loss.register_autograd(_nft_gradients, setup_context=_save_for_nft)


@define_operator(torch_backend.flow_noise)
def flow_noise(clean: Tensor, sigma: Tensor, seeds: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(clean)
    return _empty_like(clean), clean.new_empty(0, dtype=dtype) if seeds is None else _empty_like(clean, dtype)


@define_operator(torch_backend.quantise_rows)
def quantise_rows(x: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    return _empty_like(x, torch.float8_e4m3fn), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
