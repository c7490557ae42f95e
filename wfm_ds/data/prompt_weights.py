"""Sampling of prompts by the standard deviation (std) of their rewards.

    weight = floor + (1 - floor) * s / max(s)

s is the std of a prompt, where s^2 is the running mean of the reward variances of the prompt's groups. max(s) is the
largest std of all prompts, and floor is the smallest weight.

A prompt that has no rewards yet gets the mean std of the prompts with rewards. If all stds are 0, all weights are
equal.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.data.order import permutation
from wfm_ds.seeds import derive_seed

Weights = npt.NDArray[np.int64]

UNIT = 2**20  # the largest weight; integers give identical results on every machine
SEED_BITS = 63  # number of bits of derive_seed


class RewardStdTable:
    """Running mean of the reward variance of each prompt. It is NaN for a prompt that has no rewards yet."""

    def __init__(self, num_prompts: int, *, floor: float, memory: float) -> None:
        """floor: weight of a prompt with std 0, in (0, 1]. memory: decay of a running mean per group, in [0, 1)."""
        self.floor, self.memory = floor, memory
        self.variances = np.full(num_prompts, np.nan)

    def update(self, prompt: int, variances: Sequence[float]) -> None:
        """Update a prompt's running mean. variances: reward variances of the prompt's groups in one RL step."""
        decay = 0.0 if math.isnan(self.variances[prompt]) else self.memory ** len(variances)
        mean = math.fsum(variances) / len(variances)
        self.variances[prompt] = mean if decay == 0 else decay * self.variances[prompt] + (1 - decay) * mean

    def weights(self) -> Weights:
        """Return the sampling weight of each prompt as a positive integer, at most UNIT."""
        stds = np.sqrt(self.variances)
        known_stds = stds[~np.isnan(stds)]
        if not known_stds.any():
            return np.full(len(stds), UNIT, np.int64)
        stds[np.isnan(stds)] = math.fsum(known_stds) / len(known_stds)
        relative_weights = self.floor + (1 - self.floor) * (stds / known_stds.max())
        # Rounded up to stay above the floor.
        weights: Weights = np.ceil(UNIT * np.minimum(relative_weights, 1.0)).astype(np.int64)
        return weights

    def stats(self) -> dict[str, float]:
        """Return metrics: number of prompts with rewards, their mean reward std, and the effective number of prompts.

        The effective number is (sum w)^2 / (sum w^2) for weights w.
        """
        stds = np.sqrt(self.variances[~np.isnan(self.variances)])
        weights = self.weights().astype(np.float64)
        stats = {
            "data/prompts_seen": float(len(stds)),
            "data/prompts_effective": float(weights.sum() ** 2 / np.square(weights).sum()),
        }
        return stats | ({"data/prompt_reward_std_mean": math.fsum(stds) / len(stds)} if len(stds) else {})

    def state(self) -> dict[str, str]:
        """Return base64 texts: `seen`, the indices of prompts with rewards, and `variances`, their running means."""
        (indices,) = np.nonzero(~np.isnan(self.variances))
        return {
            "seen": encode_array(indices.astype("<i4")),
            "variances": encode_array(self.variances[indices].astype("<f8")),
        }

    def restore(self, state: Mapping[str, str]) -> None:
        self.variances[:] = np.nan
        self.variances[decode_array(state["seen"], "<i4")] = decode_array(state["variances"], "<f8")


def draw_prompts(weights: Weights, count: int, *, seed: int, step: int) -> list[int]:
    """Return `count` prompt indices for RL step `step`.

    With n = count * weights[i] / sum(weights), prompt i is drawn floor(n) or ceil(n) times, and n times on average.
    """
    order = permutation(len(weights), derive_seed(seed, "prompt_order", step))
    # Scale to the sum instead of modulo, so that rounding errors in rewards rarely change the draw.
    start = derive_seed(seed, "prompt_start", step) * int(weights.sum()) >> SEED_BITS
    return [int(i) for i in order[systematic_sample(weights[order], count, start)]]


def systematic_sample(weights: Weights, count: int, start: int) -> npt.NDArray[np.int64]:
    """Return `count` indices by systematic sampling (Madow 1949).

    start: uniform in [0, sum(weights)). The first sampling point is at start / count.
    """
    total = int(weights.sum())
    return np.searchsorted(count * np.cumsum(weights), start + total * np.arange(count), side="right")


def encode_array(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def decode_array(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)
