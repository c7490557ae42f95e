"""Triton kernels (device code). triton_backend.py launches them.

The grid has two axes: programs per sample, and samples. Each program processes TILES blocks of BLOCK elements in
float32 and writes one float32 partial sum. A second kernel adds the partial sums. The number of programs depends only
on the length of a sample, so a sample's sum does not depend on its batch.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def cast_to_storage(x, dtype: tl.constexpr):
    if INTERPRETED and dtype == tl.bfloat16:
        # Casts in Triton's interpreter (also in tl.store) truncate. This integer arithmetic rounds finite x correctly.
        u = x.to(tl.uint32, bitcast=True)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - Triton removes the unused branch only in this form
        return x.to(dtype)


@triton.jit
def load_float32(ptr, row, i, mask):
    # other=0, so that elements past the end of a sample do not change a sum
    return tl.load(ptr + row + i, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def philox_normals(seed, base, QUADS: tl.constexpr):
    """Return normal numbers `base` to `base + 4 * QUADS - 1` of a sample (see torch_backend). base: a multiple of 4."""
    z0, z1, z2, z3 = tl.randn4x(seed, base // 4 + tl.arange(0, QUADS))
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit
def sde_kernel(
    v_ptr,
    x_ptr,
    out_ptr,  # next latents: read if GIVEN, else written
    z_ptr,  # noise, or None
    seed_ptr,  # seeds, or None
    mean_ptr,  # or None
    coef_ptr,
    part_ptr,  # [B, SPLIT]
    n,
    coef_stride,
    GIVEN: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the next latents, and partial sums of (next latents - mean)^2 for their log-probability.

    If GIVEN is set, read the next latents instead of computing them. Equal latents give equal sums.
    """
    part, sample = tl.program_id(0), tl.program_id(1)
    row = sample.to(tl.int64) * n  # int64: a batch of videos can exceed 2**31 elements
    coef = coef_ptr + sample * coef_stride
    c_x, c_v = tl.load(coef).to(tl.float32), tl.load(coef + 1).to(tl.float32)
    std = tl.load(coef + 2).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        base = (part * TILES + tile) * BLOCK
        i = base + tl.arange(0, BLOCK)
        mask = i < n
        mean = c_x * load_float32(x_ptr, row, i, mask) + c_v * load_float32(v_ptr, row, i, mask)
        if GIVEN:
            out = tl.load(out_ptr + row + i, mask=mask, other=0.0)
        else:
            if z_ptr is not None:
                z = load_float32(z_ptr, row, i, mask)
            else:
                z = philox_normals(tl.load(seed_ptr + sample), base, BLOCK // 4)
            out = cast_to_storage(mean + std * z, out_ptr.dtype.element_ty)
            tl.store(out_ptr + row + i, out, mask=mask)
        if mean_ptr is not None:
            tl.store(mean_ptr + row + i, mean, mask=mask)
        d = out.to(tl.float32) - mean  # uses the rounded latents, because training reads these back
        acc += tl.where(mask, d * d, 0.0)
    tl.store(part_ptr + sample * SPLIT + part, tl.sum(acc, 0))


@triton.jit
def sde_finish_kernel(part_ptr, coef_ptr, log_prob_ptr, n, coef_stride, SPLIT: tl.constexpr):
    sample = tl.program_id(0)
    coef = coef_ptr + sample * coef_stride
    total = tl.sum(tl.load(part_ptr + sample * SPLIT + tl.arange(0, SPLIT)), 0)
    log_prob = tl.load(coef + 4) - tl.load(coef + 3) * (total.to(tl.float64) / n)
    tl.store(log_prob_ptr + sample, log_prob.to(tl.float32))


@triton.jit
def sde_gradient_kernel(
    upstream_ptr,
    v_ptr,
    x_ptr,
    next_ptr,
    coef_ptr,
    dv_ptr,
    n,
    coef_stride,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1)
    row = sample.to(tl.int64) * n
    coef = coef_ptr + sample * coef_stride
    c_x, c_v, w = tl.load(coef), tl.load(coef + 1), tl.load(coef + 3)
    slope = (tl.load(upstream_ptr + sample).to(tl.float64) * 2 * w * c_v / n).to(tl.float32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    v = load_float32(v_ptr, row, i, mask)
    mean = c_x.to(tl.float32) * load_float32(x_ptr, row, i, mask) + c_v.to(tl.float32) * v
    gradient = slope * (load_float32(next_ptr, row, i, mask) - mean)
    tl.store(dv_ptr + row + i, cast_to_storage(gradient, dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def nft_errors(v, old, clean_ptr, noise_ptr, row, i, mask, sigma, beta):
    """Return p, q and v - v_old as defined in ops.nft_loss. They are 0 past the end of a sample."""
    change = v - old
    error = sigma * (load_float32(noise_ptr, row, i, mask) - load_float32(clean_ptr, row, i, mask) - old)
    step = sigma * (beta * change)
    return error - step, error + step, change


@triton.jit
def nft_kernel(
    v_ptr,
    old_ptr,
    clean_ptr,
    noise_ptr,
    ref_ptr,  # None without a reference
    sigma_ptr,
    part_ptr,  # [B, 8, SPLIT]
    n,
    beta,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, sample = tl.program_id(0), tl.program_id(1)
    row = sample.to(tl.int64) * n
    sigma = tl.load(sigma_ptr + sample)
    abs_p = tl.zeros([BLOCK], tl.float32)
    abs_q = tl.zeros([BLOCK], tl.float32)
    square_p = tl.zeros([BLOCK], tl.float32)
    square_q = tl.zeros([BLOCK], tl.float32)
    change_square = tl.zeros([BLOCK], tl.float32)
    change_max = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    old_to_ref = tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        i = (part * TILES + tile) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        v, old = load_float32(v_ptr, row, i, mask), load_float32(old_ptr, row, i, mask)
        p, q, change = nft_errors(v, old, clean_ptr, noise_ptr, row, i, mask, sigma, beta)
        abs_p += tl.abs(p)
        abs_q += tl.abs(q)
        square_p += p * p
        square_q += q * q
        change_square += change * change
        change_max = tl.maximum(change_max, change * change)
        if ref_ptr is not None:
            ref = load_float32(ref_ptr, row, i, mask)
            kl += (v - ref) * (v - ref)
            old_to_ref += (old - ref) * (old - ref)
    out = part_ptr + sample * 8 * SPLIT + part
    tl.store(out, tl.sum(abs_p, 0))
    tl.store(out + SPLIT, tl.sum(abs_q, 0))
    tl.store(out + 2 * SPLIT, tl.sum(square_p, 0))
    tl.store(out + 3 * SPLIT, tl.sum(square_q, 0))
    tl.store(out + 4 * SPLIT, tl.sum(change_square, 0))
    tl.store(out + 5 * SPLIT, tl.max(change_max, 0))
    tl.store(out + 6 * SPLIT, tl.sum(kl, 0))
    tl.store(out + 7 * SPLIT, tl.sum(old_to_ref, 0))


@triton.jit
def row_sum(ptr, row: tl.constexpr, SPLIT: tl.constexpr):
    return tl.sum(tl.load(ptr + row * SPLIT + tl.arange(0, SPLIT)), 0)


@triton.jit
def nft_finish_kernel(
    part_ptr, reward_ptr, policy_ptr, kl_ptr, stats_ptr, batch, n, beta, MIN_WEIGHT: tl.constexpr, SPLIT: tl.constexpr
):
    sample = tl.program_id(0)
    part = part_ptr + sample * 8 * SPLIT
    weight_p = tl.maximum(row_sum(part, 0, SPLIT) / n, MIN_WEIGHT)
    weight_q = tl.maximum(row_sum(part, 1, SPLIT) / n, MIN_WEIGHT)
    loss_p = row_sum(part, 2, SPLIT) / n / weight_p
    loss_q = row_sum(part, 3, SPLIT) / n / weight_q
    r = tl.load(reward_ptr + sample)
    tl.store(policy_ptr + sample, (r * loss_p + (1.0 - r) * loss_q) / beta)
    tl.store(kl_ptr + sample, row_sum(part, 6, SPLIT) / n)
    stats = stats_ptr + sample
    tl.store(stats, loss_p)
    tl.store(stats + batch, loss_q)
    tl.store(stats + 2 * batch, weight_p)
    tl.store(stats + 3 * batch, weight_q)
    tl.store(stats + 4 * batch, row_sum(part, 4, SPLIT) / n)
    tl.store(stats + 5 * batch, tl.max(tl.load(part + 5 * SPLIT + tl.arange(0, SPLIT)), 0))
    tl.store(stats + 6 * batch, row_sum(part, 7, SPLIT) / n)


@triton.jit
def nft_gradient_kernel(
    upstream_ptr,
    upstream_kl_ptr,  # None without a reference
    v_ptr,
    old_ptr,
    clean_ptr,
    noise_ptr,
    ref_ptr,
    sigma_ptr,
    reward_ptr,
    stats_ptr,
    dv_ptr,
    batch,
    n,
    beta,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1)
    row = sample.to(tl.int64) * n
    sigma = tl.load(sigma_ptr + sample)
    r = tl.load(reward_ptr + sample).to(tl.float64)
    scale = 2 * tl.load(upstream_ptr + sample).to(tl.float64) * sigma.to(tl.float64) / n
    slope_p = (-scale * r / tl.load(stats_ptr + 2 * batch + sample).to(tl.float64)).to(tl.float32)
    slope_q = (scale * (1 - r) / tl.load(stats_ptr + 3 * batch + sample).to(tl.float64)).to(tl.float32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    v, old = load_float32(v_ptr, row, i, mask), load_float32(old_ptr, row, i, mask)
    p, q, _ = nft_errors(v, old, clean_ptr, noise_ptr, row, i, mask, sigma, beta)
    gradient = slope_p * p + slope_q * q
    if ref_ptr is not None:
        slope = (2 * tl.load(upstream_kl_ptr + sample).to(tl.float64) / n).to(tl.float32)
        gradient += slope * (v - load_float32(ref_ptr, row, i, mask))
    tl.store(dv_ptr + row + i, cast_to_storage(gradient, dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def flow_noise_kernel(
    clean_ptr,
    sigma_ptr,
    seed_ptr,  # None: the noise is read
    noise_ptr,  # written if there are seeds, else read
    noisy_ptr,
    n,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1)
    row = sample.to(tl.int64) * n
    base = tl.program_id(0) * BLOCK
    i = base + tl.arange(0, BLOCK)
    mask = i < n
    sigma = tl.load(sigma_ptr + sample)
    if seed_ptr is not None:
        eps = philox_normals(tl.load(seed_ptr + sample), base, BLOCK // 4)
        tl.store(noise_ptr + row + i, eps, mask=mask)
    else:
        eps = load_float32(noise_ptr, row, i, mask)
    noisy = (1.0 - sigma) * load_float32(clean_ptr, row, i, mask) + sigma * eps
    tl.store(noisy_ptr + row + i, cast_to_storage(noisy, noisy_ptr.dtype.element_ty), mask=mask)


@triton.jit
def e4m3_bits(x):
    """Convert x to the bits of float8 e4m3, rounding to nearest even. x must be NaN or in [-448, 448]."""
    if INTERPRETED:
        # The interpreter's cast truncates, so round with integer arithmetic. Normal numbers keep three mantissa bits.
        # Below 2^-6, e4m3 numbers are multiples of 2^-9: x * 2^9 is rounded to an integer by adding 2^23, where the
        # float32 spacing is 1.
        u = x.to(tl.uint32, bitcast=True)
        magnitude = u & 0x7FFFFFFF
        rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        steps = ((tl.abs(x) * 512.0 + 8388608.0) - 8388608.0).to(tl.uint32)
        byte = tl.where(magnitude < 0x3C800000, steps, rounded)
        byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
        return (byte | (u >> 24 & 0x80)).to(tl.uint8)
    else:  # noqa: RET505
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def quantise_rows_kernel(x_ptr, byte_ptr, scale_ptr, n, MAX: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize one row of n elements per program. n is at most BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < n
    x = load_float32(x_ptr, row * n, i, mask)
    # Compare the bits of magnitudes as integers. Their order is that of floats, and NaN is the largest. A maximum of
    # floats may ignore NaN.
    greatest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    scale = tl.where(greatest == 0.0, 1.0, tl.div_rn(greatest, MAX))
    scale = tl.where(scale < LEAST, LEAST, scale)
    y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))  # NaN passes through
    tl.store(byte_ptr + row * n + i, e4m3_bits(y), mask=mask)
    tl.store(scale_ptr + row, scale)
