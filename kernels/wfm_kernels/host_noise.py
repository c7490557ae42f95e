"""NumPy implementation of the noise contract (noise.py) for CPUs: the same bits in a third to half of the time.

Logarithm, square root, sine and cosine use torch, because numpy's results differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_kernels.philox import KEY_STEPS, MIN_UNIFORM, MULTIPLIERS, ROUNDS, TO_UNIT, TWO_PI, WORD_MASK

_HOST_BLOCK = 16384  # counters per block: an array of their words has 256 KiB, and the overhead per operation is small
_U64, _F32 = np.uint64, np.float32
_HALF_BITS, _WORD_MASK = _U64(32), _U64(WORD_MASK)
_MULTIPLIERS = np.array(MULTIPLIERS, _U64).reshape(2, 1, 1)
_KEY_STEPS = (np.arange(ROUNDS, dtype=_U64)[:, None] * np.array(KEY_STEPS, _U64)).reshape(ROUNDS, 2, 1, 1)

PhiloxWords = npt.NDArray[np.uint32]


def host_philox_words(seeds: npt.NDArray[np.int64], num_counters: int, block_size: int) -> Iterator[PhiloxWords]:
    """Yield the Philox words of `num_counters` counters in blocks [2, 2, B, count] uint32, for seeds [B].

    Element [i, j] of a block is word 2 j + i of each counter. block_size: maximum number of counters per block. The
    next block overwrites the array.
    """
    keys = seeds.view(_U64)
    # Carries into the upper halves are masked off in each round.
    round_keys = np.stack([keys, keys >> _HALF_BITS])[:, :, None] + _KEY_STEPS
    states = np.empty((3, 2, len(seeds), block_size), _U64)
    words = np.empty((2, 2, len(seeds), block_size), np.uint32)
    for first in range(0, num_counters, block_size):
        count = min(block_size, num_counters - first)
        _run_rounds(round_keys, first, states[..., :count], words[..., :count])
        yield words[..., :count]


def _run_rounds(
    round_keys: npt.NDArray[np.uint64], first: int, states: npt.NDArray[np.uint64], words: PhiloxWords
) -> None:
    multiplied, product, others = states
    multiplied[0], multiplied[1], others[:] = np.arange(first, first + words.shape[-1], dtype=_U64), 0, 0
    for key in round_keys:
        np.multiply(multiplied, _MULTIPLIERS, out=product)
        np.right_shift(product[::-1], _HALF_BITS, out=multiplied)  # swaps the halves of the state
        np.bitwise_xor(multiplied, others, out=multiplied)
        np.bitwise_xor(multiplied, key, out=multiplied)
        np.bitwise_and(multiplied, _WORD_MASK, out=multiplied)
        product, others = others[::-1], product[::-1]
    words[0], words[1] = multiplied, others  # uint32 keeps the lower halves


def host_normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Return standard normal noise [B, n] float32 for int64 seeds [B] on the CPU, as defined in noise.py."""
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
