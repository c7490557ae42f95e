"""Eager torch backend of the norms and gates. Computes in float32 (float64 for float64 tensors).

Its functions have the same arguments and results as the functions in norm_triton.py. The forward functions run the
operators of diffusers' modules and blocks, so their results are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from wfm_kernels.torch_backend import working_dtype


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.to(working_dtype(x)).pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, round_first: bool) -> Tensor:
    y = x * _inverse_rms(x, eps)
    if weight is not None and round_first:
        y = y.to(x.dtype) * weight
    elif weight is not None:
        y = weight.to(y.dtype) * y
    return y.to(x.dtype)


def rms_norm_backward(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    round_first: bool,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, empty if not requested."""
    rstd = _inverse_rms(x, eps)
    y, g = x * rstd, upstream.to(rstd.dtype)
    grad_x, grad_weight = x.new_empty(0), x.new_empty(0)
    if for_weight and weight is not None:
        factor = y.to(x.dtype).to(y.dtype) if round_first else y
        grad_weight = (g * factor).flatten(0, -2).sum(0).to(weight.dtype)
    if for_x:
        g = g if weight is None else g * weight
        grad_x = torch.empty_like(x).copy_(rstd * (g - y * (g * y).mean(-1, keepdim=True)))
    return grad_x, grad_weight


def _factor(scale: Tensor, plus_one: bool) -> Tensor:
    return 1 + scale if plus_one else scale


def adaptive_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, center: bool, plus_one: bool) -> Tensor:
    """center: subtract the mean (layer norm); otherwise RMS norm."""
    rows = x.to(scale.dtype)
    if center and not plus_one and scale.shape[:2] == (1, 1):
        return functional.layer_norm(rows, x.shape[-1:], scale[0, 0], shift[0, 0], eps).to(x.dtype)
    y = functional.layer_norm(rows, x.shape[-1:], eps=eps) if center else rms_norm(x, None, eps, round_first=True)
    return (y * _factor(scale, plus_one) + shift).to(x.dtype)


def adaptive_norm_backward(
    upstream: Tensor,
    x: Tensor,
    scale: Tensor,
    eps: float,
    center: bool,
    plus_one: bool,
    for_x: bool,
    for_scale: bool,
    for_shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, scale and shift, empty if not requested."""
    g, rows = upstream.to(working_dtype(x)), x.to(working_dtype(x))
    rows = rows - rows.mean(-1, keepdim=True) if center else rows
    rstd = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    y, grads = rows * rstd, [tensor.new_empty(0) for tensor in (x, scale, scale)]
    if for_scale:
        grads[1] = (g * y.to(scale.dtype)).sum_to_size(scale.shape).to(scale.dtype)
    if for_shift:
        grads[2] = g.sum_to_size(scale.shape).to(scale.dtype)
    if for_x:
        g = g * _factor(scale, plus_one)
        g = g - g.mean(-1, keepdim=True) if center else g
        grads[0] = (rstd * (g - y * (g * y).mean(-1, keepdim=True))).to(x.dtype)
    return grads[0], grads[1], grads[2]


def gate_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return (x + gate * y).to(x.dtype)


def gate_residual_backward(
    upstream: Tensor, y: Tensor, gate: Tensor, for_y: bool, for_gate: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the gate, empty if not requested. The gradient of x is `upstream`."""
    g = upstream.to(working_dtype(y))
    grad_y = (g * gate).to(y.dtype) if for_y else y.new_empty(0)
    return grad_y, (g * y).sum_to_size(gate.shape).to(gate.dtype) if for_gate else gate.new_empty(0)
