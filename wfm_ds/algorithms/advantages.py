"""Advantages, one per sample, from the scores of an RL step: float64 on the host, the same bits on every rank.

A sample whose reward failed has no reward, and a group with fewer than two rewards no advantages: None, never a number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import RlSettings
    from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
    from wfm_ds.types import Score

Array: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]

STD_OFFSET = 1e-4  # DiffusionNFT's and Flow-GRPO's
ZERO_STD = 1e-6  # a group whose rewards spread less than this, relative to max(1, |mean|), is constant
MODES: dict[str, Callable[[Array], Array]] = {
    "all": lambda a: a,
    "positive_only": lambda a: np.maximum(a, 0.0),
    "negative_only": lambda a: np.minimum(a, 0.0),
    "one_only": lambda a: (a > 0).astype(np.float64),
    "binary": np.sign,
}
MOSTLY = 0.5  # the share of clipped scores that is worth a warning


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of an RL step by sample; None in both lists: the sample has none."""

    totals: list[float | None]  # R = scale * clip(sum of weight * part)
    parts: list[tuple[float, ...] | None]  # clipped scores of the functions whose weight is not 0
    weights: tuple[float, ...]  # of these functions
    stats: dict[str, float]  # reward/total/clipped_fraction, when the recipe clips the sum

    def reordered(self, order: Sequence[int]) -> Rewards:
        """Sample i gets what sample order[i] has."""
        return Rewards([self.totals[i] for i in order], [self.parts[i] for i in order], self.weights, self.stats)


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of an RL step."""

    values: list[float | None]  # by sample, clipped, after the mode; None: the sample is not trained
    stats: dict[str, float]  # adv/* and reward/total/*; what cannot be known (no valid group) is absent


def step_rewards(scores: Sequence[Mapping[str, Score]], recipe: RewardRecipe) -> Rewards:
    """The rewards of samples that have a score, by function name, of every function whose weight is not 0.

    None where one of these failed, has no score, or the sum overflows.
    """
    counting = [f for f in recipe.functions if f.weight != 0]
    weights = tuple(f.weight for f in counting)
    parts = [_parts(sample, counting) for sample in scores]
    sums = [None if p is None else sum(w * part for w, part in zip(weights, p, strict=True)) for p in parts]
    sums = [None if s is None or not math.isfinite(s * recipe.scale) else s for s in sums]
    totals = [None if s is None else recipe.scale * _clipped(s, recipe.clip) for s in sums]
    known = [s for s in sums if s is not None]
    stats = {}
    if recipe.clip is not None and known:
        stats["reward/total/clipped_fraction"] = _mean(float(_clipped(s, recipe.clip) != s) for s in known)
    return Rewards(totals, [None if s is None else p for s, p in zip(sums, parts, strict=True)], weights, stats)


def _parts(sample: Mapping[str, Score], functions: Sequence[RewardFunction]) -> tuple[float, ...] | None:
    values = [_value(sample, f) for f in functions]
    known = [_clipped(v, f.clip) for v, f in zip(values, functions, strict=True) if v is not None]
    return tuple(known) if len(known) == len(functions) else None


def _value(sample: Mapping[str, Score], function: RewardFunction) -> float | None:
    score = sample.get(function.name)
    return None if score is None else score.value


def _clipped(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def step_advantages(
    rewards: Rewards,
    groups: Sequence[str],
    settings: RlSettings,
    *,
    transform: Callable[[Array], Array] | None = None,
) -> Advantages:
    """Rewards centred within their group and scaled; then `transform`, the clip and the mode, in this order.

    settings.advantage_std: each reward is divided by its standard deviation + 1e-4 over its group or over all samples,
    or by 1. settings.combine: `sum` compares the totals; `mean` each part, A = sum of weight * A_f / number of parts;
    `gdpo` each part too, B = sum of weight * A_f and A = (B - mean B)/(std B + 1e-4) over all compared samples.

    A group in which everything that is compared is constant gets exactly 0 before `transform` (elementwise), and with
    zero_std: drop None. best_of_n ranks what `transform` gave; of equals it takes the first as the best ones. Without
    equals the order of the samples does not change a bit. Raises ValueError for unequal lengths and rewards that are
    not finite.
    """
    valid, compared, columns, constant = _comparison(rewards, groups, settings)
    raw = _normalised(columns, valid, compared, settings)
    raw[[i for members, flat in zip(compared, constant, strict=True) if flat for i in members]] = 0.0
    shaped = raw if transform is None else transform(raw)
    final = MODES[settings.adv_mode](np.clip(shaped, -settings.adv_clip_max, settings.adv_clip_max))

    varied = [members for members, flat in zip(compared, constant, strict=True) if not flat]
    trained = varied if settings.drops_zero_std else compared
    kept = {int(i) for members in trained for i in _best_and_worst(members, shaped, settings.best_of_n)}
    stats = _stats(rewards, shaped, compared, constant, settings.adv_clip_max) | {
        "adv/groups_skipped": float(len(set(groups)) - len(compared)),
        "adv/samples_dropped": float(len(groups) - len(kept)),
    }
    return Advantages([float(final[i]) if i in kept else None for i in range(len(groups))], stats)


def best_and_worst(
    rewards: Rewards, groups: Sequence[str], settings: RlSettings, count: int
) -> tuple[list[int], list[str]]:
    """The indices, ascending, of `count` samples of each group: half of them its best and half its worst ones, as
    best_of_n ranks them; and the groups that have something to teach, whose rewards are not all equal.

    Samples without a reward are taken only where a group has fewer than `count` with one. Groups have at least `count`
    samples; an odd count is for groups of that size. Raises ValueError as step_advantages does.
    """
    valid, compared, columns, constant = _comparison(rewards, groups, settings)
    ranked = _normalised(columns, valid, compared, settings)
    kept: list[int] = []
    for members in _members(range(len(groups)), groups).values():
        known = [i for i in members if rewards.totals[i] is not None]
        unknown = [i for i in members if rewards.totals[i] is None]
        chosen = _best_and_worst(np.array(known, np.intp), ranked, count).tolist()
        kept += [*chosen, *unknown[: count - len(chosen)]]
    teaching = [groups[members[0]] for members, flat in zip(compared, constant, strict=True) if not flat]
    return sorted(kept), teaching


def _comparison(
    rewards: Rewards, groups: Sequence[str], settings: RlSettings
) -> tuple[list[int], list[Indices], list[tuple[float, Array]], list[bool]]:
    """The samples with a reward; those of each group that has two or more of them; what is compared, by sample; and
    whether all of it is equal in the group."""
    if len(rewards.totals) != len(groups):
        raise ValueError(f"{len(rewards.totals)} rewards and {len(groups)} groups do not belong together")
    valid = [i for i, total in enumerate(rewards.totals) if total is not None]
    compared = [np.array(members) for members in _members(valid, groups).values() if len(members) >= 2]
    columns = _compared_columns(rewards, settings.combine)
    if not all(np.isfinite(values[valid]).all() for _, values in columns):
        raise ValueError(f"rewards must be finite, a failed one is None: got {rewards.totals}")
    constant = [all(_is_constant(values[members]) for _, values in columns) for members in compared]
    return valid, compared, columns, constant


def _compared_columns(rewards: Rewards, combine: str) -> list[tuple[float, Array]]:
    """The values that are compared within groups, each with its weight: by sample, NaN where there is no reward."""
    if combine == "sum":
        return [(1.0, np.array([math.nan if r is None else r for r in rewards.totals], np.float64))]
    nothing = (math.nan,) * len(rewards.weights)
    by_sample = np.array([nothing if p is None else p for p in rewards.parts], np.float64)
    share = len(rewards.weights) if combine == "mean" else 1
    return [(weight / share, by_sample[:, f]) for f, weight in enumerate(rewards.weights)]


def _normalised(
    columns: Sequence[tuple[float, Array]], valid: Sequence[int], compared: Sequence[Indices], settings: RlSettings
) -> Array:
    """Advantages before transform, clip and mode; 0 where there are none."""
    unbiased = settings.std_unbiased
    advantages = np.zeros(len(columns[0][1]))
    for weight, values in columns:
        for members in compared:
            of_group = values[members]
            centred = np.zeros_like(of_group) if _is_constant(of_group) else of_group - _mean(of_group)
            scale_over = {"group": of_group, "global": values[valid], "none": None}[settings.advantage_std]
            divisor = 1.0 if scale_over is None else _std(scale_over, unbiased) + STD_OFFSET
            advantages[members] += weight * centred / divisor
    if settings.combine == "gdpo" and compared:
        everyone = np.concatenate(compared)
        joined = advantages[everyone]
        advantages[everyone] = (joined - _mean(joined)) / (_std(joined, unbiased) + STD_OFFSET)
    return advantages


def _best_and_worst(members: Indices, advantages: Array, count: int | None) -> Indices:
    if count is None or count >= len(members):
        return members
    order = members[np.argsort(-advantages[members], kind="stable")]
    return np.concatenate([order[: count // 2], order[len(order) - count // 2 :]])


def _stats(
    rewards: Rewards, advantages: Array, compared: Sequence[Indices], constant: Sequence[bool], clip: float
) -> dict[str, float]:
    totals = np.array([math.nan if r is None else r for r in rewards.totals], np.float64)
    valid = totals[~np.isnan(totals)]
    stats = dict(rewards.stats)
    if len(valid):
        stats |= {"reward/total/mean": _mean(valid), "reward/total/std": _std(valid)}
    if compared:
        magnitudes = np.abs(advantages[np.concatenate(compared)])
        stats |= {
            "reward/total/group_std_mean": _mean(_std(totals[members]) for members in compared),
            "adv/zero_std_ratio": _mean(float(flat) for flat in constant),
            "adv/abs_mean": _mean(magnitudes),
            "adv/clip_fraction": _mean(magnitudes > clip),
        }
    return stats


def _is_constant(of_group: Array) -> bool:
    return bool(np.ptp(of_group) <= ZERO_STD * max(1.0, abs(_mean(of_group))))


def group_variance(rewards: Sequence[float | None]) -> float | None:
    """Return the variance of one group's rewards by n - 1, whose mean for a judge that says 0 or 1 is p (1 - p); 0 of
    a constant group, None of fewer than two rewards."""
    of_group = np.sort(np.array([reward for reward in rewards if reward is not None], np.float64))
    if len(of_group) < 2:
        return None
    return 0.0 if _is_constant(of_group) else float(np.var(of_group, ddof=1))


def reward_stats(
    scores: Sequence[Mapping[str, Score]], groups: Sequence[str], functions: Sequence[RewardFunction]
) -> dict[str, float]:
    """`reward/<name>/...` of every function, those of weight 0 too: raw scores before clip and weight.

    mean, std (population), min, max and clipped_fraction over the scores that are numbers; group_std_mean over the
    groups with at least two of them; failed is a count, to which a missing score adds; seconds_mean over all scores.
    What is unknown is absent.
    """
    stats: dict[str, float] = {}
    for function in functions:
        values = {i: v for i, s in enumerate(scores) if (v := _value(s, function)) is not None}
        seconds = [s[function.name].seconds for s in scores if function.name in s]
        spreads = [_std(values[i] for i in m) for m in _members(values, groups).values() if len(m) >= 2]
        of_function = {"failed": float(len(scores) - len(values))}
        if values:
            of_function |= {
                "mean": _mean(values.values()),
                "std": _std(values.values()),
                "min": min(values.values()),
                "max": max(values.values()),
                "clipped_fraction": _mean(float(_clipped(v, function.clip) != v) for v in values.values()),
            }
        if spreads:
            of_function["group_std_mean"] = _mean(spreads)
        if seconds:
            of_function["seconds_mean"] = _mean(seconds)
        stats |= {f"reward/{function.name}/{what}": value for what, value in of_function.items()}
    return stats


def reward_warnings(stats: Mapping[str, float], functions: Sequence[RewardFunction], num_samples: int) -> list[str]:
    """One sentence for every reward that counts and cannot teach: the same for all samples, or mostly clipped.

    stats: of reward_stats, of an RL step of num_samples samples.
    """
    warnings = []
    for name in (f.name for f in functions if f.weight != 0):
        known = num_samples - int(stats[f"reward/{name}/failed"])
        if known >= 2 and stats[f"reward/{name}/min"] == stats[f"reward/{name}/max"]:
            value = stats[f"reward/{name}/mean"]
            warnings.append(f"reward {name} is {value:g} for all {known} samples: there is nothing to learn from it")
        clipped = stats.get(f"reward/{name}/clipped_fraction", 0.0)
        if clipped > MOSTLY:
            warnings.append(f"the clip of reward {name} changes {clipped:.0%} of its scores: widen it")
    if stats.get("reward/total/clipped_fraction", 0.0) > MOSTLY:
        warnings.append(f"reward.clip changes {stats['reward/total/clipped_fraction']:.0%} of the totals: widen it")
    return warnings


def _members(valid: Iterable[int], groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for i in valid:
        members[groups[i]].append(i)
    return members


# Sums of sorted numbers: no order of the samples changes a bit of them.
def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.sort(np.fromiter(values, np.float64))))


def _std(values: Iterable[float], unbiased: bool = False) -> float:
    return float(np.std(np.sort(np.fromiter(values, np.float64)), ddof=int(unbiased)))
