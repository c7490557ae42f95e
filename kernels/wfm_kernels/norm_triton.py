"""Triton backend of the norms and gates, with the interface of norm_torch.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from wfm_kernels import norm_kernels as kernels
from wfm_kernels import triton_backend

TILE = 2048  # elements of a program: one long row, or several short ones
THREAD_ELEMENTS = 16
MAX_PROGRAMS = 1024  # of a sum over rows; enough to fill a GPU
GATE_BLOCK, GATE_WARPS = 1024, 4  # of the kernels that need no whole rows
TOKENS_OF_A_SUM = 16  # tokens that a program adds up; does not depend on the batch size


def launch_shape(n: int) -> tuple[int, int, int]:
    """Return (rows of a program, block size, warps) for rows of n elements."""
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, TILE // block)
    return rows, block, min(16, max(1, rows * block // (32 * THREAD_ELEMENTS)))


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Rows of several tensors of one shape, in the memory order of the first tensor."""

    sizes: tuple[int, int]  # sizes of the last two of three dimensions of rows
    strides: list[tuple[int, int, int]]  # of each tensor

    @classmethod
    def merge(cls, *tensors: Tensor) -> RowLayout | None:
        """Merge the dimensions of rows. Returns None if more than three dimensions remain, or if a row has gaps."""
        if any(tensor.stride(-1) != 1 for tensor in tensors):
            return None
        dims = list(zip(tensors[0].shape[:-1], *(tensor.stride()[:-1] for tensor in tensors), strict=True))
        merged: list[tuple[int, ...]] = []
        for size, *strides in sorted(dims, key=lambda dim: -dim[1]):
            if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], strides, strict=True)):
                merged[-1] = (merged[-1][0] * size, *strides)
            elif size > 1:
                merged.append((size, *strides))
        if len(merged) > 3:
            return None
        merged += [(1, *[0] * len(tensors))] * (3 - len(merged))
        sizes, *by_tensor = zip(*merged, strict=True)
        return cls((sizes[1], sizes[2]), [(s[0], s[1], s[2]) for s in by_tensor])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, round_first: bool) -> Tensor:
    out, n = torch.empty_like(x), x.shape[-1]
    layout = RowLayout.merge(x, out)
    if layout is None:
        return out.copy_(rms_norm(x.contiguous(), weight, eps, round_first))
    num_rows, block, warps = launch_shape(n)
    triton_backend._launch_kernel(
        kernels.rms_norm_kernel,
        (triton.cdiv(x.numel() // n, num_rows),),
        x,
        weight,
        out,
        n,
        x.numel() // n,
        *layout.sizes,
        *layout.strides[0],
        *layout.strides[1],
        eps,
        ROUND=round_first,
        ROWS=num_rows,
        BLOCK=block,
        warps=warps,
    )
    return out


def rms_norm_backward(
    upstream: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    round_first: bool,
    for_x: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor]:
    n, device = x.shape[-1], x.device
    num_rows, block, warps = launch_shape(n)
    blocks = triton.cdiv(x.numel() // n, num_rows)
    tiles = triton.cdiv(blocks, MAX_PROGRAMS) if for_weight else 1
    programs = triton.cdiv(blocks, tiles)
    grad_x = torch.empty_like(x)
    layout = RowLayout.merge(x, upstream, grad_x)
    if layout is None:
        arguments = upstream.contiguous(), x.contiguous(), weight, eps, round_first, for_x, for_weight
        rows, grad_weight = rms_norm_backward(*arguments)
        return grad_x.copy_(rows) if for_x else rows, grad_weight
    parts = triton_backend._empty_tensor((programs, n), torch.float32, device) if for_weight else None
    triton_backend._launch_kernel(
        kernels.rms_norm_gradient_kernel,
        (programs,),
        upstream,
        x,
        weight,
        grad_x if for_x else None,
        parts,
        n,
        x.numel() // n,
        *layout.sizes,
        *layout.strides[1],
        *layout.strides[0],
        *layout.strides[2],
        eps,
        tiles,
        ROUND=round_first,
        ROWS=num_rows,
        BLOCK=block,
        warps=warps,
    )
    grad_weight = x.new_empty(0) if parts is None else parts.sum(0).to(x.dtype)
    return grad_x if for_x else x.new_empty(0), grad_weight


def _empty_contiguous(x: Tensor) -> Tensor:
    return triton_backend._empty_tensor(tuple(x.shape), x.dtype, x.device)


def _row_strides(modulation: Tensor) -> tuple[int, int]:
    """Return the strides of samples and of tokens, 0 for a dimension of size 1 that is expanded."""
    return tuple(  # type: ignore[return-value]
        0 if size == 1 else stride for size, stride in zip(modulation.shape[:2], modulation.stride()[:2], strict=True)
    )


def _row_launch(n: int) -> dict[str, int]:
    _, block, warps = launch_shape(n)
    return {"BLOCK": block, "warps": warps}


def adaptive_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, center: bool, plus_one: bool) -> Tensor:
    x = x.contiguous()
    scale, shift = (m if m.stride(-1) == 1 else m.contiguous() for m in (scale, shift))
    out, (batch, tokens, n) = _empty_contiguous(x), x.shape
    triton_backend._launch_kernel(
        kernels.adaptive_norm_kernel,
        (batch * tokens,),
        x,
        scale,
        shift,
        out,
        n,
        tokens,
        *_row_strides(scale),
        *_row_strides(shift),
        eps,
        CENTER=center,
        PLUS_ONE=plus_one,
        **_row_launch(n),
    )
    return out


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
    upstream, x = upstream.contiguous(), x.contiguous()
    scale = scale if scale.stride(-1) == 1 else scale.contiguous()
    batch, tokens, n = x.shape
    per_token = scale.shape[1] == tokens
    sums = (for_scale or for_shift) and not per_token
    tiles = TOKENS_OF_A_SUM if sums else 1
    programs = triton.cdiv(tokens, tiles)
    grad_x = _empty_contiguous(x) if for_x else x.new_empty(0)
    whole = _empty_gradient(x, scale) if for_scale and per_token else None
    part_scale, part_shift = (
        triton_backend._empty_tensor((batch, programs, n), torch.float32, x.device) if wanted and sums else None
        for wanted in (for_scale, for_shift)
    )
    if for_x or for_scale or sums:
        triton_backend._launch_kernel(
            kernels.adaptive_norm_gradient_kernel,
            (programs, batch),
            upstream,
            x,
            scale,
            grad_x if for_x else None,
            whole,
            part_scale,
            part_shift,
            n,
            tokens,
            *_row_strides(scale),
            eps,
            tiles,
            CENTER=center,
            PLUS_ONE=plus_one,
            **_row_launch(n),
        )
    grad_scale, grad_shift = scale.new_empty(0), scale.new_empty(0)
    if whole is not None:
        grad_scale = _sum_samples(whole, scale)
    elif part_scale is not None:
        grad_scale = _sum_samples(part_scale.sum(1, keepdim=True), scale)
    if part_shift is not None:
        grad_shift = _sum_samples(part_shift.sum(1, keepdim=True), scale)
    elif for_shift:
        grad_shift = _sum_samples(upstream.to(torch.float32), scale)
    return grad_x, grad_scale, grad_shift


def _empty_gradient(x: Tensor, modulation: Tensor) -> Tensor:
    """Return memory for the gradient of each token's modulation: float32 if it will be summed over samples."""
    dtype = modulation.dtype if len(modulation) == len(x) else torch.float32
    return triton_backend._empty_tensor(tuple(x.shape), dtype, x.device)


def _sum_samples(gradient: Tensor, modulation: Tensor) -> Tensor:
    """Reduce a gradient [B, tokens, n] to the shape [B or 1, tokens, n] and the dtype of the modulation."""
    return gradient.sum_to_size(modulation.shape).to(modulation.dtype)


def gate_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    out, (batch, tokens, n) = _empty_contiguous(x), x.shape
    triton_backend._launch_kernel(
        kernels.gate_residual_kernel,
        (batch * tokens, triton.cdiv(n, GATE_BLOCK)),
        x,
        y,
        gate,
        out,
        n,
        tokens,
        *_row_strides(gate),
        BLOCK=GATE_BLOCK,
        warps=GATE_WARPS,
    )
    return out


def gate_residual_backward(
    upstream: Tensor, y: Tensor, gate: Tensor, for_y: bool, for_gate: bool
) -> tuple[Tensor, Tensor]:
    upstream, y = upstream.contiguous(), y.contiguous()
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    batch, tokens, n = y.shape
    per_token = gate.shape[1] == tokens
    tiles = TOKENS_OF_A_SUM if for_gate and not per_token else 1
    programs = triton.cdiv(tokens, tiles)
    grad_y = _empty_contiguous(y) if for_y else y.new_empty(0)
    whole = _empty_gradient(y, gate) if for_gate and per_token else None
    sums = for_gate and not per_token
    parts = triton_backend._empty_tensor((batch, programs, n), torch.float32, y.device) if sums else None
    triton_backend._launch_kernel(
        kernels.gate_residual_gradient_kernel,
        (programs, batch, triton.cdiv(n, GATE_BLOCK)),
        upstream,
        y,
        gate,
        grad_y if for_y else None,
        whole,
        parts,
        n,
        tokens,
        *_row_strides(gate),
        tiles,
        BLOCK=GATE_BLOCK,
        warps=GATE_WARPS,
    )
    if whole is not None:
        return grad_y, _sum_samples(whole, gate)
    return grad_y, gate.new_empty(0) if parts is None else _sum_samples(parts.sum(1, keepdim=True), gate)
