"""The noise contract: each normal number depends only on its sample's seed and on its index in the sample.

Number i of a sample with seed s is word i mod 4 of the Box-Muller transform of Philox4x32-10 (Salmon et al. 2011) with
key s (64 bits) and counter i div 4, for every batch, rank, launch shape and backend. The integers are equal on all
devices; logarithm and sine may differ between devices in the last bits (below 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wfm_kernels.host_noise import host_normal_noise
from wfm_kernels.philox import KEY_STEPS, MIN_UNIFORM, MULTIPLIERS, ROUNDS, TO_UNIT, TWO_PI, WORD_MASK

NOISE_CONTRACT = 1  # version; increased when the numbers for a seed change

_BLOCK = 8192  # counters per block; limits the memory for words


def philox_words(seeds: Tensor, num_counters: int, first: int = 0) -> Tensor:
    """Return the Philox words [B, num_counters, 4] of counters first, first + 1, ...: int64 in [0, 2**32)."""
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
