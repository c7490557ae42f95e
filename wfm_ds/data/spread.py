"""Prompts drawn by the spread of their rewards: where all samples of a prompt are rewarded alike, none of them teaches.

    weight = floor + (1 - floor) s / max s      s^2: running mean of the variance of the rewards within a group

A prompt is drawn between `floor` and 1 times as often as the one with the largest spread, whatever the rewards' scale,
and of n prompts each has at least the share floor / n of the draws. For a judge that says 0 or 1, s^2 estimates
p (1 - p) of the share p of good samples. A prompt that was never rewarded has the mean weight of those that were: all
that is known of it is that it is one of them. Without any spread all weights are equal.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.data.order import permuted
from wfm_ds.seeds import derive_seed

Weights = npt.NDArray[np.int64]

UNIT = 2**20  # the largest weight: shares are exact in whole numbers, on every machine
SEED_BITS = 63  # of derive_seed


class SpreadTable:
    """The running variance of the rewards of each prompt, NaN of those that were never rewarded."""

    def __init__(self, num_prompts: int, *, floor: float, memory: float) -> None:
        """floor: smallest weight, in (0, 1]. memory: share of its old value that a variance keeps where a group is
        observed, in [0, 1)."""
        self.floor, self.memory = floor, memory
        self.variances = np.full(num_prompts, np.nan)

    def observe(self, prompt: int, variances: Sequence[float]) -> None:
        """Take up the variances of a prompt's groups of one RL step, in any order; each counts alike."""
        kept = 0.0 if math.isnan(self.variances[prompt]) else self.memory ** len(variances)
        mean = math.fsum(variances) / len(variances)
        self.variances[prompt] = mean if kept == 0 else kept * self.variances[prompt] + (1 - kept) * mean

    def weights(self) -> Weights:
        """Return the weight of each prompt, in parts of UNIT."""
        spreads = np.sqrt(self.variances)
        seen = spreads[~np.isnan(spreads)]
        if not seen.any():
            return np.full(len(spreads), UNIT, np.int64)
        spreads[np.isnan(spreads)] = math.fsum(seen) / len(seen)
        shares = self.floor + (1 - self.floor) * (spreads / seen.max())
        weights: Weights = np.ceil(UNIT * np.minimum(shares, 1.0)).astype(np.int64)  # up: none is below the floor
        return weights

    def stats(self) -> dict[str, float]:
        """Metrics: how many prompts were rewarded so far, their mean spread, and the effective number of prompts that
        the next draw chooses from, (sum of weights)^2 / sum of weights^2."""
        spreads = np.sqrt(self.variances[~np.isnan(self.variances)])
        weights = self.weights().astype(np.float64)
        stats = {
            "data/prompts_seen": float(len(spreads)),
            "data/prompts_effective": float(weights.sum() ** 2 / np.square(weights).sum()),
        }
        return stats | ({"data/prompt_spread_mean": math.fsum(spreads) / len(spreads)} if len(spreads) else {})

    def state(self) -> dict[str, str]:
        """JSON of the prompts that were rewarded: 16 characters each."""
        (seen,) = np.nonzero(~np.isnan(self.variances))
        return {"seen": packed(seen.astype("<i4")), "variances": packed(self.variances[seen].astype("<f8"))}

    def restore(self, state: Mapping[str, str]) -> None:
        """Take up what `state` gave for as many prompts."""
        self.variances[:] = np.nan
        self.variances[unpacked(state["seen"], "<i4")] = unpacked(state["variances"], "<f8")


def drawn(weights: Weights, count: int, *, seed: int, step: int) -> list[int]:
    """Draw the `count` prompts of RL step `step`: prompt i comes count * w_i / sum(w) times on average, and never a
    whole time more or less than that. So none comes twice unless its own share is more than one."""
    order = permuted(len(weights), derive_seed(seed, "prompt_order", step))
    # In proportion to the sum, not modulo it: rewards that differ in their last bits hardly ever draw other prompts.
    start = derive_seed(seed, "prompt_start", step) * int(weights.sum()) >> SEED_BITS
    return [int(i) for i in order[systematic(weights[order], count, start)]]


def systematic(weights: Weights, count: int, start: int) -> npt.NDArray[np.int64]:
    """Return the `count` places that a systematic sample (Madow 1949) takes of the line on which these weights lie end
    to end: a point each sum(w) / count, from start / count on. start: in [0, sum(w)), drawn evenly."""
    total = int(weights.sum())
    return np.searchsorted(count * np.cumsum(weights), start + total * np.arange(count), side="right")


def packed(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def unpacked(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)
