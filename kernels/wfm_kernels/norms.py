"""The public norms and gates, registered as the torch operators `wfm_kernels::*`.

They replace chains of eager operators in the blocks of diffusers. The functions check shapes, dtypes and devices of
arguments, and select a backend. In the registered operators, an optional result that was not requested is an empty
tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wfm_kernels import norm_torch
from wfm_kernels.library import define_operator
from wfm_kernels.ops import LATENT_DTYPES, MAX_SAMPLES, Backend, should_use_triton
from wfm_kernels.torch_backend import EXACT_DTYPE

MAX_NORM_ROW = 8192  # maximum number of channels: a program holds whole rows of two tensors in registers
TRITON_BACKEND = "wfm_kernels.norm_triton"


def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, round_first: bool = True, backend: Backend = "auto"
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last dimension, computed in float32.

    x: [..., n] float32, bfloat16 or float16. weight: [n] in the dtype of x, or None. The result has the dtype and
    strides of x. round_first: round to the dtype of x before the product with the weight, like diffusers' RMSNorm.
    Differentiable once, with respect to x and weight. Raises ValueError for invalid arguments.
    """
    _require_rows(x)
    if weight is not None and (weight.shape != x.shape[-1:] or weight.dtype != x.dtype):
        raise ValueError(f"weight must be [{x.shape[-1]}] {x.dtype}, got {list(weight.shape)} {weight.dtype}")
    result: Tensor = rms_norm_operator(x, weight, eps, round_first, should_use_triton(backend, x[:1], weight))
    return result


def adaptive_layer_norm(
    x: Tensor, scale: Tensor, shift: Tensor, *, eps: float, plus_one: bool = True, backend: Backend = "auto"
) -> Tensor:
    """Return layer_norm(x) * (1 + scale) + shift in the dtype of x. Without plus_one: layer_norm(x) * scale + shift.

    x: [B, tokens, n] float32, bfloat16 or float16. scale, shift: [B or 1, tokens or 1, n], with the same shape, in the
    dtype of x or in float32. All intermediate results are rounded to the dtype of scale and shift.
    Differentiable once, with respect to x, scale and shift. Raises ValueError for invalid arguments.
    """
    _require_scale_and_shift(x, scale, shift)
    center, triton = True, should_use_triton(backend, x[:1], scale, shift)
    result: Tensor = adaptive_norm_operator(x, scale, shift, eps, center, plus_one, triton)
    return result


def adaptive_rms_norm(x: Tensor, scale: Tensor, shift: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """Return rms_norm(x) * (1 + scale) + shift in the dtype of x, like `adaptive_layer_norm`.

    scale and shift must have the dtype of x.
    """
    _require_scale_and_shift(x, scale, shift)
    if scale.dtype != x.dtype:
        raise ValueError(f"scale and shift must be {x.dtype}, got {scale.dtype}")
    center, plus_one, triton = False, True, should_use_triton(backend, x[:1], scale, shift)
    result: Tensor = adaptive_norm_operator(x, scale, shift, eps, center, plus_one, triton)
    return result


def gate_residual(x: Tensor, y: Tensor, gate: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return x + gate * y in the dtype of x.

    x, y: [B, tokens, n], both float32, bfloat16 or float16. gate: [B or 1, tokens or 1, n] in the dtype of x or in
    float32; the product is rounded to its dtype. Differentiable once, with respect to x, y and gate. Raises ValueError
    for invalid arguments.
    """
    _require_rows(x)
    _require_modulation(x, gate=gate)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"x and y must have the same shape and dtype, got {list(x.shape)} {x.dtype} and {list(y.shape)} {y.dtype}"
        )
    result: Tensor = gate_residual_operator(x, y, gate, should_use_triton(backend, x[:1], y, gate))
    return result


def _require_rows(x: Tensor) -> None:
    if x.dtype not in (*LATENT_DTYPES, EXACT_DTYPE) or x.ndim == 0 or x.numel() == 0 or x.shape[-1] > MAX_NORM_ROW:
        raise ValueError(
            f"x must be [..., n] float32, bfloat16 or float16, not empty, with n at most {MAX_NORM_ROW}, got "
            f"{list(x.shape)} {x.dtype}"
        )


def _require_scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> None:
    _require_rows(x)
    _require_modulation(x, scale=scale, shift=shift)
    if scale.shape != shift.shape or scale.dtype != shift.dtype:
        raise ValueError(
            f"scale and shift must have the same shape and dtype, got {list(scale.shape)} {scale.dtype} and "
            f"{list(shift.shape)} {shift.dtype}"
        )


def _require_modulation(x: Tensor, **modulations: Tensor) -> None:
    if x.ndim != 3 or len(x) > MAX_SAMPLES:
        raise ValueError(f"x must be [B, tokens, n] with B at most {MAX_SAMPLES}, got {list(x.shape)}")
    batch, tokens, n = x.shape
    for name, m in modulations.items():
        if m.ndim != 3 or len(m) not in (1, batch) or m.shape[1] not in (1, tokens) or m.shape[2] != n:
            raise ValueError(f"{name} must be [{batch} or 1, {tokens} or 1, {n}], got {list(m.shape)}")
        if m.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} must be {x.dtype} or torch.float32, got {m.dtype}")


def _empty_if(wanted: bool, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor) if wanted else tensor.new_empty(0)


def _empty_contiguous(wanted: bool, tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape if wanted else 0)


@define_operator(norm_torch.rms_norm, TRITON_BACKEND)
def rms_norm_operator(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@define_operator(norm_torch.rms_norm_backward, TRITON_BACKEND)
def rms_norm_backward(upstream: Tensor, x: Tensor, weight: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    _eps, _round_first, for_x, for_weight, _triton = arguments
    return _empty_if(for_x, x), x.new_empty(0) if weight is None else _empty_if(for_weight, weight)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.settings = inputs
    ctx.save_for_backward(x, weight)


def _rms_norm_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_weight = ctx.needs_input_grad[:2]
    eps, round_first, triton = ctx.settings
    grads = rms_norm_backward(upstream, *ctx.saved_tensors, eps, round_first, for_x, for_weight, triton)
    return grads[0] if for_x else None, grads[1] if for_weight else None, None, None, None


rms_norm_operator.register_autograd(_rms_norm_gradients, setup_context=_save_rms_norm)


@define_operator(norm_torch.adaptive_norm, TRITON_BACKEND)
def adaptive_norm_operator(x: Tensor, *_: Any) -> Tensor:
    return _empty_contiguous(True, x)


@define_operator(norm_torch.adaptive_norm_backward, TRITON_BACKEND)
def adaptive_norm_backward(upstream: Tensor, x: Tensor, scale: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *_settings, for_x, for_scale, for_shift, _triton = arguments
    return _empty_contiguous(for_x, x), _empty_contiguous(for_scale, scale), _empty_contiguous(for_shift, scale)


def _save_adaptive_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, _shift, *ctx.settings = inputs
    ctx.save_for_backward(x, scale)


def _adaptive_norm_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_scale, for_shift = ctx.needs_input_grad[:3]
    (x, scale), (*settings, triton) = ctx.saved_tensors, ctx.settings
    grads: list[Tensor | None] = [None, None, None]
    if for_shift and scale.shape == x.shape:  # not a sum over tokens or samples
        grads[2], for_shift = upstream.to(scale.dtype), False
    wanted = (for_x, for_scale, for_shift)
    if any(wanted):
        results = adaptive_norm_backward(upstream, x, scale, *settings, *wanted, triton)
        grads = [result if asked else old for result, asked, old in zip(results, wanted, grads, strict=True)]
    return *grads, None, None, None, None


adaptive_norm_operator.register_autograd(_adaptive_norm_gradients, setup_context=_save_adaptive_norm)


@define_operator(norm_torch.gate_residual, TRITON_BACKEND)
def gate_residual_operator(x: Tensor, *_: Any) -> Tensor:
    return _empty_contiguous(True, x)


@define_operator(norm_torch.gate_residual_backward, TRITON_BACKEND)
def gate_residual_backward(
    upstream: Tensor, y: Tensor, gate: Tensor, for_y: bool, for_gate: bool, triton: bool
) -> tuple[Tensor, Tensor]:
    return _empty_contiguous(for_y, y), _empty_contiguous(for_gate, gate)


def _save_gate_residual(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, y, gate, ctx.triton = inputs
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, gate)  # only the gate's gradient needs y


def _gate_residual_gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    for_x, for_y, for_gate, _ = ctx.needs_input_grad
    y, gate = ctx.saved_tensors
    y = upstream if y is None else y  # without the gate's gradient, only the shape and dtype of y are read
    grads = (
        gate_residual_backward(upstream, y, gate, for_y, for_gate, ctx.triton) if for_y or for_gate else (None, None)
    )
    return upstream if for_x else None, grads[0] if for_y else None, grads[1] if for_gate else None, None


gate_residual_operator.register_autograd(_gate_residual_gradients, setup_context=_save_gate_residual)
