"""The noise contract: a normal number is a function of its sample's seed and its place in the sample, nothing else.

Number i of a sample with seed s is word i mod 4 of the Box-Muller transform of Philox4x32-10 (Salmon et al. 2011) with
key s (64 bits) and counter i div 4. So neither batch, position, rank, launch shape nor backend changes it. Devices
agree on the integers; the logarithm and the sine of another device may differ in the last bits (below 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_CONTRACT = 1  # goes up when the same seed starts to mean other numbers

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# 32 signed bits to [0, 1), the largest scale whose product stays below 1 in float32; and the floor that bounds |z|.
_TO_UNIT, _FLOOR = 4.6566127342e-10, 1e-7


def philox_words(seeds: Tensor, num_counters: int) -> Tensor:
    """Words of the counters 0 .. num_counters-1: [B, num_counters, 4] int64 in [0, 2**32), of int64 seeds [B]."""
    counter = torch.arange(num_counters, dtype=torch.int64, device=seeds.device).expand(len(seeds), -1)
    key = [(seeds & _WORD).unsqueeze(1), ((seeds >> 32) & _WORD).unsqueeze(1)]
    a, b, c, d = counter, *[torch.zeros_like(counter)] * 3
    for _ in range(_ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key[0], low_c, high_a ^ d ^ key[1], low_a
        key = [(part + step) & _WORD for part, step in zip(key, _KEY_STEPS, strict=True)]
    return torch.stack([a, b, c, d], dim=-1)


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # int64 wraps like uint64; the shift brings sign bits in from above, which the mask takes off again.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def normal_from_words(words: Tensor) -> Tensor:
    """Four standard normal numbers float32 of every four words: shape of `words` ([..., 4] int64)."""
    unit = torch.minimum(words, _WORD - words).float() * _TO_UNIT
    radius = (-2.0 * unit[..., 0::2].clamp_min(_FLOOR).log()).sqrt()
    angle = 6.283185307179586 * unit[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def normal(seeds: Tensor, n: int) -> Tensor:
    """[B, n] float32 by the contract, of int64 seeds [B]."""
    return normal_from_words(philox_words(seeds, -(-n // 4))).flatten(1)[:, :n].contiguous()
