"""The noise contract: each normal number depends only on its sample's seed and on its index in the sample.

Philox4x32-10 (Salmon et al. 2011) with the sample's seed as 64-bit key and the counter i div 4 gives four words. The
Box-Muller transform of these words gives four normal numbers, and number i of the sample is entry i mod 4 of them. The
words are equal on all devices. The normal numbers may differ between devices by less than 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# TO_UNIT maps 31-bit integers to [0, 1). It is the largest factor whose float32 products stay below 1. MIN_UNIFORM is a
# lower bound of uniform numbers, which bounds the magnitude of normal numbers.
TO_UNIT, MIN_UNIFORM = 4.6566127342e-10, 1e-7
TWO_PI = 6.283185307179586
NOISE_CONTRACT = 1  # version; increased when the numbers for a seed change

_BLOCK = 16384  # counters that are processed at once; limits the memory for words


def philox_words(seeds: Tensor, num_counters: int, first: int = 0) -> Tensor:
    """Return the Philox words of the counters from `first` to `first + num_counters - 1`.

    seeds: int64 [B]. The result is int64 [B, num_counters, 4] with values in [0, 2**32).
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
    """Convert Philox words, int64 [..., 4], to standard normal numbers, float32 [..., 4]."""
    unit = torch.minimum(words, WORD_MASK - words).float() * TO_UNIT
    radius = (-2.0 * unit[..., 0::2].clamp_min(MIN_UNIFORM).log()).sqrt()
    angle = TWO_PI * unit[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def normal_noise(seeds: Tensor, n: int) -> Tensor:
    """Return n standard normal numbers per seed, float32 [B, n] on the device of the seeds. seeds: int64 [B]."""
    num_counters, at_once = -(-n // 4), max(1, _BLOCK // max(1, len(seeds)))
    blocks = [
        normal_from_words(philox_words(seeds, min(at_once, num_counters - first), first)).flatten(1)
        for first in range(0, num_counters, at_once)
    ]
    return torch.cat(blocks, dim=1)[:, :n].contiguous()
