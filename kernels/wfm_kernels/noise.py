"""The noise contract: a normal number is a function of its sample's seed and its place in the sample, nothing else.

Number i of a sample with seed s is word i mod 4 of the Box-Muller transform of Philox4x32-10 (Salmon et al. 2011) with
key s (64 bits) and counter i div 4. So neither batch, position, rank, launch shape nor backend changes it. Devices
agree on the integers; the logarithm and the sine of another device may differ in the last bits (below 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wfm_kernels.host_noise import host_normal
from wfm_kernels.philox import FLOOR, KEY_STEPS, MULTIPLIERS, ROUNDS, TO_UNIT, TWO_PI, WORD

NOISE_CONTRACT = 1  # goes up when the same seed starts to mean other numbers

_BLOCK = 8192  # counters at once: few words are in memory at a time


def philox_words(seeds: Tensor, num_counters: int, first: int = 0) -> Tensor:
    """Words of `num_counters` counters from `first` on: [B, num_counters, 4] int64 in [0, 2**32), of int64 seeds [B].

    The two halves of a state are computed as one tensor [2, B, num_counters], and the keys of all rounds at once: on
    few numbers the time is that of starting an operation.
    """
    multipliers, steps = (
        torch.tensor(pair, dtype=torch.int64, device=seeds.device).view(2, 1, 1) for pair in (MULTIPLIERS, KEY_STEPS)
    )
    rounds = torch.arange(ROUNDS, device=seeds.device).view(-1, 1, 1, 1)
    keys = (torch.stack([seeds & WORD, (seeds >> 32) & WORD]).unsqueeze(2) + rounds * steps) & WORD
    multiplied = torch.zeros(2, len(seeds), num_counters, dtype=torch.int64, device=seeds.device)
    multiplied[0] = torch.arange(first, first + num_counters, device=seeds.device)
    others = torch.zeros_like(multiplied)
    for key in keys.unbind():
        # int64 wraps like uint64; the shift brings sign bits in from above, which the mask takes off again.
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32).bitwise_and_(WORD).bitwise_xor_(others).bitwise_xor_(key)
        others = product.bitwise_and_(WORD)
    return torch.stack([multiplied[0], others[0], multiplied[1], others[1]], dim=-1)


def normal_from_words(words: Tensor) -> Tensor:
    """Four standard normal numbers float32 of every four words: shape of `words` ([..., 4] int64)."""
    unit = torch.minimum(words, WORD - words).float() * TO_UNIT
    radius = (-2.0 * unit[..., 0::2].clamp_min(FLOOR).log()).sqrt()
    angle = TWO_PI * unit[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)


def normal(seeds: Tensor, n: int) -> Tensor:
    """[B, n] float32 by the contract, of int64 seeds [B], on their device."""
    return host_normal(seeds, n) if seeds.device.type == "cpu" else torch_normal(seeds, n)


def torch_normal(seeds: Tensor, n: int) -> Tensor:
    """`normal` by torch operations alone, on any device: on a CPU the reference of `host_normal`."""
    num_counters, at_once = -(-n // 4), max(1, _BLOCK // max(1, len(seeds)))
    blocks = [
        normal_from_words(philox_words(seeds, min(at_once, num_counters - first), first)).flatten(1)
        for first in range(0, num_counters, at_once)
    ]
    return torch.cat(blocks, dim=1)[:, :n].contiguous()
