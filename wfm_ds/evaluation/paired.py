"""Comparison of two models that drew the same prompts with the same seeds.

The unit is the prompt: seeds of one prompt resemble each other, so an interval that counts pictures is too narrow. The
noise of a picture follows from its seed alone, so differences are taken within pairs, which removes what prompt and
seed are worth by themselves. NaN stands for a score that is missing; a pair that lacks one is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
MIN_PROMPTS = 5
"""Fewer have no interval: with so few the t distribution is most of the answer."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its interval."""

    value: float
    half_width: float | None  # of the interval of CONFIDENCE; None with fewer than MIN_PROMPTS prompts
    prompts: int
    samples: int  # scores, or pairs of them, that it was made of

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.value + self.half_width

    @property
    def rose(self) -> bool:
        """The whole interval is above 0."""
        return self.low is not None and self.low > 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance of one model's scores above another's, pair by pair."""

    estimate: Estimate
    better: int  # pairs in which the score is higher
    missing: int  # pairs that lack a score
    spread: float  # standard deviation of all scores of the model that it is compared with
    p_fell: float  # of a difference this low or lower if there is none in truth; NaN without an interval

    @property
    def z(self) -> float:
        """The estimate in units of `spread`."""
        if self.spread > 0:
            return self.estimate.value / self.spread
        return math.copysign(math.inf, self.estimate.value) if self.estimate.value else 0.0


def prompt_means(scores: Array) -> Array:
    """Mean over the seeds of each prompt that has a score: [P, S] to [at most P]."""
    known = ~np.isnan(scores)
    counts = known.sum(axis=1)
    sums = np.where(known, scores, 0.0).sum(axis=1)
    means: Array = sums[counts > 0] / counts[counts > 0]
    return means


def mean_of(scores: Array) -> Estimate | None:
    """Estimate the mean of scores [P, S] over prompts, with the t interval of their means; None without any score."""
    means = prompt_means(scores)
    if not len(means):
        return None
    half = None if len(means) < MIN_PROMPTS else t_quantile(len(means)) * standard_error(means)
    return Estimate(float(means.mean()), half, len(means), int((~np.isnan(scores)).sum()))


def difference(base: Array, other: Array) -> Difference | None:
    """Compare the scores [P, S] of two models; None if no pair is whole."""
    gaps = other - base
    estimate = mean_of(gaps)
    if estimate is None:
        return None
    known = base[~np.isnan(base)]
    return Difference(
        estimate=estimate,
        better=int((gaps > 0).sum()),
        missing=int(np.isnan(gaps).sum()),
        spread=float(known.std(ddof=1)) if len(known) > 1 else 0.0,
        p_fell=p_of_a_fall(prompt_means(gaps)),
    )


def p_of_a_fall(means: Array) -> float:
    """Return the p value of Student's one-sided test that these have a mean below 0; NaN below MIN_PROMPTS."""
    if len(means) < MIN_PROMPTS:
        return math.nan
    value, error = float(means.mean()), standard_error(means)
    if error == 0:
        return 0.0 if value < 0 else 1.0
    return float(special.stdtr(len(means) - 1, value / error))


def ratio(base: Array, other: Array) -> Estimate | None:
    """Estimate how many times as large `other` [P] is as `base` [P], both above 0: the geometric mean over prompts.

    Its half_width is of the logarithm (`ratio_bounds`). Prompts where either is 0 or missing are left out.
    """
    usable = (base > 0) & (other > 0)  # NaN is not
    logs = np.log(other[usable]) - np.log(base[usable])
    found = mean_of(logs[:, None])
    return None if found is None else Estimate(math.exp(found.value), found.half_width, found.prompts, found.samples)


def ratio_bounds(found: Estimate) -> tuple[float, float] | None:
    """Return the interval of a `ratio`."""
    if found.half_width is None:
        return None
    return found.value * math.exp(-found.half_width), found.value * math.exp(found.half_width)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for how many there are (Holm 1979): comparing each with a level keeps the chance of any false
    alarm among them below it. NaN stays and does not count."""
    found = list(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(order) - rank) * p_values[i])
        found[i] = min(1.0, largest)
    return found


def standard_error(means: Array) -> float:
    return float(means.std(ddof=1)) / math.sqrt(len(means))


def t_quantile(count: int) -> float:
    return float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2))
