"""Triton kernels (device code) for norms and gates. norm_triton.py launches them.

Tensors are processed in rows of n elements. A program of a norm holds whole rows in registers, so each tensor is read
once.
Intermediate results are rounded to half precision where the same chain of eager torch operators rounds them. Loops over
tiles are `while` loops, because range() of an argument fails in the interpreter of Triton 3.6 with numpy 2.4 or newer.
"""

import triton
import triton.language as tl

from wfm_kernels.triton_kernels import cast_to_storage, load_float32


@triton.jit
def round_float32(x, dtype: tl.constexpr):
    """Round float32 x to a storage dtype and convert it back."""
    return cast_to_storage(x, dtype).to(tl.float32)


@triton.jit
def row_offset(row, d1, d2, s0, s1, s2):
    """Return the offset of a row in a tensor [d0, d1, d2, n] with these strides. Divides int32, which is faster."""
    return (row // (d1 * d2)).to(tl.int64) * s0 + (row // d2 % d1).to(tl.int64) * s1 + (row % d2).to(tl.int64) * s2


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,  # [n] or None
    out_ptr,
    n,
    rows,
    d1,
    d2,
    xs0,
    xs1,
    xs2,
    os0,
    os1,
    os2,
    eps,
    ROUND: tl.constexpr,  # round before the product with the weight
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (i < n)[None, :]
    x = load_float32(x_ptr, row_offset(row, d1, d2, xs0, xs1, xs2)[:, None], i[None, :], mask)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / n + eps)[:, None]
    if weight_ptr is not None:
        if ROUND:
            y = round_float32(y, out_ptr.dtype.element_ty)
        y = y * load_float32(weight_ptr, 0, i, i < n)[None, :]
    out = row_offset(row, d1, d2, os0, os1, os2)[:, None] + i[None, :]
    tl.store(out_ptr + out, cast_to_storage(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_gradient_kernel(
    g_ptr,
    x_ptr,
    weight_ptr,  # [n] or None
    dx_ptr,  # or None
    part_ptr,  # [programs, n] partial sums of the weight's gradient, or None
    n,
    rows,
    d1,
    d2,
    gs0,
    gs1,
    gs2,
    xs0,
    xs1,
    xs2,
    ds0,
    ds1,
    ds2,
    eps,
    tiles,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    tile = 0
    while tile < tiles:
        row = (tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (i < n)[None, :]
        x = load_float32(x_ptr, row_offset(row, d1, d2, xs0, xs1, xs2)[:, None], i[None, :], mask)
        g = load_float32(g_ptr, row_offset(row, d1, d2, gs0, gs1, gs2)[:, None], i[None, :], mask)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / n + eps)[:, None]
        y = x * rstd
        if part_ptr is not None:
            total += g * (round_float32(y, x_ptr.dtype.element_ty) if ROUND else y)
        if dx_ptr is not None:
            if weight_ptr is not None:
                g = g * load_float32(weight_ptr, 0, i, i < n)[None, :]
            dx = rstd * (g - y * (tl.sum(g * y, 1) / n)[:, None])
            out = row_offset(row, d1, d2, ds0, ds1, ds2)[:, None] + i[None, :]
            tl.store(dx_ptr + out, cast_to_storage(dx, dx_ptr.dtype.element_ty), mask=mask)
        tile += 1
    if part_ptr is not None:
        tl.store(part_ptr + tl.program_id(0) * n + i, tl.sum(total, 0), mask=i < n)


@triton.jit
def normalize_row(x_ptr, row, i, mask, n, eps, CENTER: tl.constexpr):
    """Return the normalized row (0 past its end) and 1 / standard deviation, or 1 / RMS without CENTER."""
    x = load_float32(x_ptr, row, i, mask)
    if CENTER:
        x = tl.where(mask, x - tl.sum(x, 0) / n, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    return x * rstd, rstd


@triton.jit
def load_factor(scale_ptr, row, i, mask, PLUS_ONE: tl.constexpr):
    factor = load_float32(scale_ptr, row, i, mask)
    return round_float32(1.0 + factor, scale_ptr.dtype.element_ty) if PLUS_ONE else factor


@triton.jit
def adaptive_norm_kernel(
    x_ptr,  # [B, tokens, n]
    scale_ptr,  # [B, tokens, n] with strides, which are 0 if all tokens or samples have the same scale
    shift_ptr,
    out_ptr,
    n,
    tokens,
    cs0,
    cs1,
    hs0,
    hs1,
    eps,
    CENTER: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sample, token = row // tokens, row % tokens
    i = tl.arange(0, BLOCK)
    mask = i < n
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    y, _ = normalize_row(x_ptr, row * n, i, mask, n, eps, CENTER)
    y = round_float32(
        round_float32(y, dtype) * load_factor(scale_ptr, sample * cs0 + token * cs1, i, mask, PLUS_ONE), dtype
    )
    y = round_float32(y + load_float32(shift_ptr, sample * hs0 + token * hs1, i, mask), dtype)
    tl.store(out_ptr + row * n + i, cast_to_storage(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def adaptive_norm_gradient_kernel(
    g_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,  # or None
    dscale_ptr,  # the scale's gradient [B, tokens, n], or None
    part_scale_ptr,  # [B, programs, n] partial sums over tokens, or None
    part_shift_ptr,  # or None
    n,
    tokens,
    cs0,
    cs1,
    eps,
    tiles,
    CENTER: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    total_scale = tl.zeros((BLOCK,), tl.float32)
    total_shift = tl.zeros((BLOCK,), tl.float32)
    tile = 0
    while tile < tiles:
        token = tl.program_id(0).to(tl.int64) * tiles + tile
        mask = (i < n) & (token < tokens)
        row = (sample * tokens + token) * n
        y, rstd = normalize_row(x_ptr, row, i, mask, n, eps, CENTER)
        g = load_float32(g_ptr, row, i, mask)
        if part_shift_ptr is not None:
            total_shift += g
        if part_scale_ptr is not None:
            total_scale += g * round_float32(y, scale_ptr.dtype.element_ty)
        if dscale_ptr is not None:
            dscale = g * round_float32(y, scale_ptr.dtype.element_ty)
            tl.store(dscale_ptr + row + i, cast_to_storage(dscale, dscale_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            g = g * load_factor(scale_ptr, sample * cs0 + token * cs1, i, mask, PLUS_ONE)
            mean = tl.sum(g, 0) / n if CENTER else 0.0
            dx = rstd * (g - mean - y * (tl.sum(g * y, 0) / n))
            tl.store(dx_ptr + row + i, cast_to_storage(dx, dx_ptr.dtype.element_ty), mask=mask)
        tile += 1
    part = (sample * tl.num_programs(0) + tl.program_id(0)) * n + i
    if part_scale_ptr is not None:
        tl.store(part_scale_ptr + part, total_scale, mask=i < n)
    if part_shift_ptr is not None:
        tl.store(part_shift_ptr + part, total_shift, mask=i < n)


@triton.jit
def gate_residual_kernel(
    x_ptr,  # [B, tokens, n]
    y_ptr,
    gate_ptr,  # [B, tokens, n] with strides
    out_ptr,
    n,
    tokens,
    gs0,
    gs1,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    gate = load_float32(gate_ptr, row // tokens * gs0 + row % tokens * gs1, i, mask)
    step = round_float32(gate * load_float32(y_ptr, row * n, i, mask), gate_ptr.dtype.element_ty)
    out = load_float32(x_ptr, row * n, i, mask) + step
    tl.store(out_ptr + row * n + i, cast_to_storage(out, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_residual_gradient_kernel(
    g_ptr,
    y_ptr,
    gate_ptr,
    dy_ptr,  # or None
    dgate_ptr,  # the gate's gradient [B, tokens, n], or None
    part_ptr,  # [B, programs, n] partial sums over tokens, or None
    n,
    tokens,
    gs0,
    gs1,
    tiles,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    tile = 0
    while tile < tiles:
        token = tl.program_id(0).to(tl.int64) * tiles + tile
        mask = (i < n) & (token < tokens)
        row = (sample * tokens + token) * n
        g = load_float32(g_ptr, row, i, mask)
        if dy_ptr is not None:
            dy = g * load_float32(gate_ptr, sample * gs0 + token * gs1, i, mask)
            tl.store(dy_ptr + row + i, cast_to_storage(dy, dy_ptr.dtype.element_ty), mask=mask)
        if part_ptr is not None:
            total += g * load_float32(y_ptr, row, i, mask)
        if dgate_ptr is not None:
            dgate = g * load_float32(y_ptr, row, i, mask)
            tl.store(dgate_ptr + row + i, cast_to_storage(dgate, dgate_ptr.dtype.element_ty), mask=mask)
        tile += 1
    if part_ptr is not None:
        part = (sample * tl.num_programs(0) + tl.program_id(0)) * n + i
        tl.store(part_ptr + part, total, mask=i < n)
