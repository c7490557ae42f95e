"""The noise contract: each normal number depends only on its sample's seed and on its index in the sample.

Philox4x32-10 (Salmon et al. 2011) with the 64-bit key s and the counter i div 4 gives four words. Their Box-Muller
transform gives four normal numbers. Number i of a sample with seed s is entry i mod 4 of these numbers. It does not
depend on batch, rank, launch shape or backend. The integers are equal on all devices; logarithm and sine may differ
between devices in the last bits (below 1e-6).

On CPUs, a NumPy implementation is used. It returns the same bits as torch operations and is two to three times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# TO_UNIT maps 31-bit integers to [0, 1): the largest factor with products below 1 in float32. MIN_UNIFORM bounds |z|.
TO_UNIT, MIN_UNIFORM = 4.6566127342e-10, 1e-7
TWO_PI = 6.283185307179586
NOISE_CONTRACT = 1  # version; increased when the numbers for a seed change

_BLOCK = 8192  # counters per block; limits the memory for words
_HOST_BLOCK = 16384  # counters per block: an array of their words has 256 KiB, and the overhead per operation is small
_U64, _F32 = np.uint64, np.float32
_HALF_BITS, _WORD_MASK = _U64(32), _U64(WORD_MASK)
_MULTIPLIERS = np.array(MULTIPLIERS, _U64).reshape(2, 1, 1)
_KEY_STEPS = (np.arange(ROUNDS, dtype=_U64)[:, None] * np.array(KEY_STEPS, _U64)).reshape(ROUNDS, 2, 1, 1)

PhiloxWords = npt.NDArray[np.uint32]


def philox_words(seeds: Tensor, num_counters: int, first: int = 0) -> Tensor:
    """Return the Philox words of the `num_counters` counters from `first` on.

    The result is [B, num_counters, 4] int64 in [0, 2**32).
    """
    multipliers, steps = (
        torch.tensor(pair, dtype=torch.int64, device=seeds.device).view(2, 1, 1) for pair in (MULTIPLIERS, KEY_STEPS)
    )
    rounds = torch.arange(ROUNDS, device=seeds.device).view(-1, 1, 1, 1)
    keys = (torch.stack([seeds & WORD_MASK, (seeds >> 32) & WORD_MASK]).unsqueeze(2) + rounds * steps) & WORD_MASK
    multiplied = torch.zeros(2, len(seeds), num_counters, dtype=torch.int64, device=seeds.device)
    multiplied[0] = torch.arange(first, first + num_counters, device=seeds.device)
    others = torch.zeros_like(multiplied)
    for key in keys.unbind():
        # int64 wraps like uint64. The mask removes the sign bits shifted in from above.
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32).bitwise_and_(WORD_MASK).bitwise_xor_(others).bitwise_xor_(key)
        others = product.bitwise_and_(WORD_MASK)
    return torch.stack([multiplied[0], others[0], multiplied[1], others[1]], dim=-1)


def normal_from_words(words: Tensor) -> Tensor:
    """Return standard normal numbers, float32 [..., 4], for int64 words [..., 4]."""
    unit = torch.minimum(words, WORD_MASK - words).float() * TO_UNIT
    radius = (-2.0 * unit[..., 0::2].clamp_min(MIN_UNIFORM).log()).sqrt()
    angle = TWO_PI * unit[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Return standard normal noise [B, n] float32 for int64 seeds [B], on their device."""
    return host_normal_noise(seeds, n) if seeds.device.type == "cpu" else torch_normal_noise(seeds, n)


def torch_normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Compute `normal_noise` with torch operations only, on any device. Reference for `host_normal_noise`."""
    num_counters, at_once = -(-n // 4), max(1, _BLOCK // max(1, len(seeds)))
    blocks = [
        normal_from_words(philox_words(seeds, min(at_once, num_counters - first), first)).flatten(1)
        for first in range(0, num_counters, at_once)
    ]
    return torch.cat(blocks, dim=1)[:, :n].contiguous()


def host_philox_words(seeds: npt.NDArray[np.int64], num_counters: int, block_size: int) -> Iterator[PhiloxWords]:
    """Yield the Philox words of `num_counters` counters in blocks [2, 2, B, count] uint32, for seeds [B].

    Element [i, j] of a block is word 2 j + i of each counter. block_size: maximum number of counters per block. All
    blocks share one array, so each block overwrites the previous block.
    """
    keys = seeds.view(_U64)
    # Carries into the upper halves are masked off in each round.
    round_keys = np.stack([keys, keys >> _HALF_BITS])[:, :, None] + _KEY_STEPS
    states = np.empty((3, 2, len(seeds), block_size), _U64)
    words = np.empty((2, 2, len(seeds), block_size), np.uint32)
    for first in range(0, num_counters, block_size):
        count = min(block_size, num_counters - first)
        multiplied, product, others = states[..., :count]
        multiplied[0], multiplied[1], others[:] = np.arange(first, first + count, dtype=_U64), 0, 0
        for key in round_keys:
            np.multiply(multiplied, _MULTIPLIERS, out=product)
            np.right_shift(product[::-1], _HALF_BITS, out=multiplied)  # swaps the halves of the state
            np.bitwise_xor(multiplied, others, out=multiplied)
            np.bitwise_xor(multiplied, key, out=multiplied)
            np.bitwise_and(multiplied, _WORD_MASK, out=multiplied)
            product, others = others[::-1], product[::-1]
        words[0, :, :, :count], words[1, :, :, :count] = multiplied, others  # uint32 keeps the lower halves
        yield words[..., :count]


def host_normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Return standard normal noise [B, n] float32 for int64 seeds [B] on the CPU."""
    num_counters = -(-n // 4)
    at_once = max(1, min(num_counters, _HOST_BLOCK // max(1, len(seeds))))
    out = torch.empty(len(seeds), num_counters, 2, 2)
    pairs = out.numpy().transpose(2, 0, 1, 3)
    buffer = np.empty((3, 2, len(seeds), at_once), _F32)
    first = 0
    for words in host_philox_words(seeds.numpy(), num_counters, at_once):
        end = first + words.shape[-1]
        _box_muller(words, buffer[..., : end - first], pairs[:, :, first:end])
        first = end
    return out.view(len(seeds), -1)[:, :n].contiguous()


def _box_muller(words: PhiloxWords, buffer: npt.NDArray[np.float32], pairs: npt.NDArray[np.float32]) -> None:
    """Fill `pairs` [2, B, count, 2] with normal numbers. Overwrites `words` and uses `buffer` as scratch memory."""
    np.minimum(words, ~words, out=words)
    # The words are below 2**31, so they can be read as int32, which converts faster.
    np.multiply(words.view(np.int32), _F32(TO_UNIT), out=buffer[:2], dtype=_F32, casting="unsafe")
    radius, angle, cosine = buffer
    in_torch = torch.from_numpy(buffer)
    np.maximum(radius, _F32(MIN_UNIFORM), out=radius)
    in_torch[0].log_()
    np.multiply(radius, _F32(-2.0), out=radius)
    in_torch[0].sqrt_()
    np.multiply(angle, _F32(TWO_PI), out=angle)
    torch.cos(in_torch[1], out=in_torch[2])
    in_torch[1].sin_()
    np.multiply(radius, cosine, out=pairs[..., 0])
    np.multiply(radius, angle, out=pairs[..., 1])
