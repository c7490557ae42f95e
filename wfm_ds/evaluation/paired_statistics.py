"""Paired statistics of two models that sampled the same prompts with the same seeds.

Confidence intervals are over prompts, because samples of one prompt are correlated. NaN marks a missing score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
MIN_PROMPTS = 5
"""Minimum number of prompts for a confidence interval."""


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over prompts, with its confidence interval."""

    value: float
    half_width: float | None  # confidence interval: value +- half_width; None for fewer than MIN_PROMPTS prompts
    num_prompts: int
    num_samples: int  # scores, or pairs of scores

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.value + self.half_width

    @property
    def is_above_zero(self) -> bool:
        return self.low is not None and self.low > 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Score of a model minus score of the base model, over pairs of samples with the same prompt and seed."""

    estimate: MeanEstimate
    num_better: int  # pairs in which the evaluated model has the higher score
    num_missing: int  # number of pairs with a missing score
    base_std: float  # standard deviation of all scores of the base model
    p_decrease: float  # one-sided p value of a decrease; NaN without an interval

    @property
    def z(self) -> float:
        """The difference in units of the standard deviation of the base model's scores."""
        if self.base_std > 0:
            return self.estimate.value / self.base_std
        return math.copysign(math.inf, self.estimate.value) if self.estimate.value else 0.0


def prompt_means(scores: Array) -> Array:
    """Return the mean over seeds for each prompt that has a score.

    scores: [P prompts, S seeds]; NaN scores are ignored.
    """
    known = ~np.isnan(scores)
    counts = known.sum(axis=1)
    sums = np.where(known, scores, 0.0).sum(axis=1)
    means: Array = sums[counts > 0] / counts[counts > 0]
    return means


def estimate_mean(scores: Array) -> MeanEstimate | None:
    """Estimate the mean score over prompts, with a t confidence interval. Returns None if there are no scores.

    scores: [P prompts, S seeds].
    """
    means = prompt_means(scores)
    if not len(means):
        return None
    half_width = None
    if len(means) >= MIN_PROMPTS:
        half_width = float(special.stdtrit(len(means) - 1, (1 + CONFIDENCE) / 2)) * standard_error(means)
    return MeanEstimate(float(means.mean()), half_width, len(means), int((~np.isnan(scores)).sum()))


def compare_scores(base: Array, other: Array) -> Difference | None:
    """Compare the scores [P prompts, S seeds] of two models. Returns None if every pair has a missing score."""
    gaps = other - base
    estimate = estimate_mean(gaps)
    if estimate is None:
        return None
    known = base[~np.isnan(base)]
    return Difference(
        estimate=estimate,
        num_better=int((gaps > 0).sum()),
        num_missing=int(np.isnan(gaps).sum()),
        base_std=float(known.std(ddof=1)) if len(known) > 1 else 0.0,
        p_decrease=p_value_decrease(prompt_means(gaps)),
    )


def p_value_decrease(means: Array) -> float:
    """Return the p value of a one-sided t test for a mean below 0. Returns NaN for fewer than MIN_PROMPTS means."""
    if len(means) < MIN_PROMPTS:
        return math.nan
    value, error = float(means.mean()), standard_error(means)
    if error == 0:
        return 0.0 if value < 0 else 1.0
    return float(special.stdtr(len(means) - 1, value / error))


def estimate_ratio(base: Array, other: Array) -> MeanEstimate | None:
    """Estimate the geometric mean of the ratio other / base over prompts. Returns None if no prompt has a ratio.

    base, other: positive values [P prompts]. Prompts with a missing or zero value are excluded. `half_width` of the
    result refers to the logarithm of the ratio; `ratio_bounds` returns the confidence interval of the ratio.
    """
    usable = (base > 0) & (other > 0)  # False for NaN
    logs = np.log(other[usable]) - np.log(base[usable])
    log_ratio = estimate_mean(logs[:, None])
    return None if log_ratio is None else replace(log_ratio, value=math.exp(log_ratio.value))


def ratio_bounds(ratio: MeanEstimate) -> tuple[float, float] | None:
    """Return the confidence interval (low, high) of a ratio from `estimate_ratio`, or None if it has no interval."""
    if ratio.half_width is None:
        return None
    return ratio.value * math.exp(-ratio.half_width), ratio.value * math.exp(ratio.half_width)


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for multiple comparisons with Holm's method (1979). NaN values do not count as comparisons."""
    adjusted = list(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(order) - rank) * p_values[i])
        adjusted[i] = min(1.0, largest)
    return adjusted


def standard_error(means: Array) -> float:
    return float(means.std(ddof=1)) / math.sqrt(len(means))
