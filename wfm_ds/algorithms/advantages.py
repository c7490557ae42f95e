"""Rewards and advantages of an RL step, computed in float64 on the CPU and bit-identical on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import AdvantageSettings
    from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
    from wfm_ds.types import Score

Array: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]

STD_OFFSET = 1e-4  # added to a standard deviation before division, as in DiffusionNFT and Flow-GRPO
CONSTANT_TOLERANCE = 1e-6  # a group is constant if its reward range is at most this, relative to max(1, |mean|)
ADVANTAGE_MODES: dict[str, Callable[[Array], Array]] = {
    "all": lambda a: a,
    "positive_only": lambda a: np.maximum(a, 0.0),
    "negative_only": lambda a: np.minimum(a, 0.0),
    "one_only": lambda a: (a > 0).astype(np.float64),
    "binary": np.sign,
}
CLIP_WARNING_FRACTION = 0.5  # warn if a larger fraction of scores is clipped


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of an RL step. `totals` and `parts` have one entry per sample, which is None if the reward is missing."""

    totals: list[float | None]  # R = scale * clip(sum of weight * part)
    parts: list[tuple[float, ...] | None]  # clipped scores of the functions with non-zero weight
    weights: tuple[float, ...]  # weights of these functions
    stats: dict[str, float]  # reward/total/clipped_fraction, if the recipe clips the sum

    def reorder(self, order: Sequence[int]) -> Rewards:
        """Return a copy in which sample i has the rewards of sample order[i]."""
        return Rewards([self.totals[i] for i in order], [self.parts[i] for i in order], self.weights, self.stats)


@dataclass(frozen=True, slots=True)
class Advantages:
    values: list[float | None]  # final advantage of each sample; None for samples that are not trained on
    stats: dict[str, float]  # metrics adv/* and reward/total/*; those that need a valid group are omitted without one


def combine_scores(scores: Sequence[Mapping[str, Score]], recipe: RewardRecipe) -> Rewards:
    """Combine the scores of each sample into its total reward.

    scores: one {reward function: score} per sample. A total reward is None if the score of a function with non-zero
    weight failed or is missing, or if the sum overflows.
    """
    weighted = [f for f in recipe.functions if f.weight != 0]
    weights = tuple(f.weight for f in weighted)
    parts = [_score_parts(sample, weighted) for sample in scores]
    sums = [None if p is None else sum(w * part for w, part in zip(weights, p, strict=True)) for p in parts]
    sums = [None if s is None or not math.isfinite(s * recipe.scale) else s for s in sums]
    totals = [None if s is None else recipe.scale * _clip_value(s, recipe.clip) for s in sums]
    known = [s for s in sums if s is not None]
    stats = {}
    if recipe.clip is not None and known:
        stats["reward/total/clipped_fraction"] = _stable_mean(float(_clip_value(s, recipe.clip) != s) for s in known)
    return Rewards(totals, [None if s is None else p for s, p in zip(sums, parts, strict=True)], weights, stats)


def _score_parts(sample: Mapping[str, Score], functions: Sequence[RewardFunction]) -> tuple[float, ...] | None:
    values = [_score_value(sample, f) for f in functions]
    known = [_clip_value(v, f.clip) for v, f in zip(values, functions, strict=True) if v is not None]
    return tuple(known) if len(known) == len(functions) else None


def _score_value(sample: Mapping[str, Score], function: RewardFunction) -> float | None:
    score = sample.get(function.name)
    return None if score is None else score.value


def _clip_value(value: float, bounds: tuple[float, float] | None) -> float:
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def compute_advantages(
    rewards: Rewards,
    groups: Sequence[str],
    settings: AdvantageSettings,
    *,
    num_selected: int | None,
    drops_zero_std: bool,
    transform: Callable[[Array], Array] | None = None,
) -> Advantages:
    """Center and scale rewards within their group, then transform, clip and select the resulting advantages.

    settings.advantage_std selects the divisor of the centered rewards: std + 1e-4 over the group (`group`) or over all
    samples (`global`), or 1 (`none`). settings.combine selects which rewards are centered and scaled:

        sum   the total reward of each sample
        mean  each reward function separately; advantage = weighted sum of the results / number of functions
        gdpo  each reward function separately; advantage = (w - mean(w)) / (std(w) + 1e-4) with w = weighted sum of
              the results, and with mean and std over all samples of groups with at least two rewards

    `transform` (an elementwise function), settings.adv_clip_max and settings.adv_mode are then applied in this order.

    num_selected: number of samples per group to train on. None: all of them. Otherwise half of them are the best
    samples and half the worst. drops_zero_std: whether groups with equal rewards are dropped.

    Samples without a reward, samples that are not selected, dropped groups and groups with fewer than two rewards get
    None. If all rewards of a group are equal, its advantages are 0 before `transform`. Raises ValueError for unequal
    lengths and for non-finite rewards.
    """
    valid, compared, columns, constant = _compare_groups(rewards, groups, settings)
    raw = _normalize_advantages(columns, valid, compared, settings)
    raw[[i for members, flat in zip(compared, constant, strict=True) if flat for i in members]] = 0.0
    shaped = raw if transform is None else transform(raw)
    final = ADVANTAGE_MODES[settings.adv_mode](np.clip(shaped, -settings.adv_clip_max, settings.adv_clip_max))

    varied = [members for members, flat in zip(compared, constant, strict=True) if not flat]
    trained = varied if drops_zero_std else compared
    chosen = {int(i) for members in trained for i in _rank_extremes(members, shaped, num_selected)}
    stats = _advantage_stats(rewards, shaped, compared, constant, settings.adv_clip_max) | {
        "adv/groups_skipped": float(len(set(groups)) - len(compared)),
        "adv/samples_dropped": float(len(groups) - len(chosen)),
    }
    return Advantages([float(final[i]) if i in chosen else None for i in range(len(groups))], stats)


def select_best_and_worst(
    rewards: Rewards, groups: Sequence[str], settings: AdvantageSettings, count: int
) -> tuple[list[int], list[str]]:
    """Select the count/2 samples with the highest and the count/2 samples with the lowest advantages of each group.

    Returns (sorted indices of the selected samples, ids of the groups with unequal rewards). If a group has fewer than
    `count` rewards, samples without a reward are selected too. Each group must have at least `count` samples, or
    exactly `count` if `count` is odd. Raises ValueError for unequal lengths and for non-finite rewards.
    """
    valid, compared, columns, constant = _compare_groups(rewards, groups, settings)
    ranked = _normalize_advantages(columns, valid, compared, settings)
    selected: list[int] = []
    for members in _group_members(range(len(groups)), groups).values():
        known = [i for i in members if rewards.totals[i] is not None]
        unknown = [i for i in members if rewards.totals[i] is None]
        chosen = _rank_extremes(np.array(known, np.intp), ranked, count).tolist()
        selected += [*chosen, *unknown[: count - len(chosen)]]
    varied = [groups[members[0]] for members, flat in zip(compared, constant, strict=True) if not flat]
    return sorted(selected), varied


def _compare_groups(
    rewards: Rewards, groups: Sequence[str], settings: AdvantageSettings
) -> tuple[list[int], list[Indices], list[tuple[float, Array]], list[bool]]:
    """Check rewards and groups. Returns (valid, compared, columns, constant).

    valid: indices of the samples with a reward. compared: for each group with at least two such samples, their indices.
    columns: see `_reward_columns`. constant: for each group in `compared`, whether all of its rewards are equal.
    """
    if len(rewards.totals) != len(groups):
        raise ValueError(f"{len(rewards.totals)} rewards but {len(groups)} group ids")
    valid = [i for i, total in enumerate(rewards.totals) if total is not None]
    compared = [np.array(members) for members in _group_members(valid, groups).values() if len(members) >= 2]
    columns = _reward_columns(rewards, settings.combine)
    if not all(np.isfinite(values[valid]).all() for _, values in columns):
        raise ValueError(f"rewards must be finite, or None if failed: got {rewards.totals}")
    constant = [all(_is_constant(values[members]) for _, values in columns) for members in compared]
    return valid, compared, columns, constant


def _reward_columns(rewards: Rewards, combine: str) -> list[tuple[float, Array]]:
    """Return (weight, values of all samples) for each reward that is normalized separately. Missing values are NaN."""
    if combine == "sum":
        return [(1.0, np.array([math.nan if r is None else r for r in rewards.totals], np.float64))]
    missing = (math.nan,) * len(rewards.weights)
    by_sample = np.array([missing if p is None else p for p in rewards.parts], np.float64)
    divisor = len(rewards.weights) if combine == "mean" else 1
    return [(weight / divisor, by_sample[:, f]) for f, weight in enumerate(rewards.weights)]


def _normalize_advantages(
    columns: Sequence[tuple[float, Array]],
    valid: Sequence[int],
    compared: Sequence[Indices],
    settings: AdvantageSettings,
) -> Array:
    """Return each sample's advantage before `transform` and clipping. Samples that are not in `compared` get 0."""
    unbiased = settings.std_unbiased
    advantages = np.zeros(len(columns[0][1]))
    for weight, values in columns:
        for members in compared:
            group_values = values[members]
            centered = (
                np.zeros_like(group_values) if _is_constant(group_values) else group_values - _stable_mean(group_values)
            )
            scale_over = {"group": group_values, "global": values[valid], "none": None}[settings.advantage_std]
            divisor = 1.0 if scale_over is None else _stable_std(scale_over, unbiased) + STD_OFFSET
            advantages[members] += weight * centered / divisor
    if settings.combine == "gdpo" and compared:
        members = np.concatenate(compared)
        combined = advantages[members]
        advantages[members] = (combined - _stable_mean(combined)) / (_stable_std(combined, unbiased) + STD_OFFSET)
    return advantages


def _rank_extremes(members: Indices, advantages: Array, count: int | None) -> Indices:
    if count is None or count >= len(members):
        return members
    order = members[np.argsort(-advantages[members], kind="stable")]
    return np.concatenate([order[: count // 2], order[len(order) - count // 2 :]])


def _advantage_stats(
    rewards: Rewards, advantages: Array, compared: Sequence[Indices], constant: Sequence[bool], clip: float
) -> dict[str, float]:
    totals = np.array([math.nan if r is None else r for r in rewards.totals], np.float64)
    valid = totals[~np.isnan(totals)]
    stats = dict(rewards.stats)
    if len(valid):
        stats |= {"reward/total/mean": _stable_mean(valid), "reward/total/std": _stable_std(valid)}
    if compared:
        magnitudes = np.abs(advantages[np.concatenate(compared)])
        stats |= {
            "reward/total/group_std_mean": _stable_mean(_stable_std(totals[members]) for members in compared),
            "adv/zero_std_ratio": _stable_mean(float(flat) for flat in constant),
            "adv/abs_mean": _stable_mean(magnitudes),
            "adv/clip_fraction": _stable_mean(magnitudes > clip),
        }
    return stats


def _is_constant(values: Array) -> bool:
    return bool(np.ptp(values) <= CONSTANT_TOLERANCE * max(1.0, abs(_stable_mean(values))))


def group_variance(rewards: Sequence[float | None]) -> float | None:
    """Return the unbiased variance of the rewards of one group, or None if it has fewer than two rewards."""
    values = np.sort(np.array([reward for reward in rewards if reward is not None], np.float64))
    if len(values) < 2:
        return None
    return 0.0 if _is_constant(values) else float(np.var(values, ddof=1))


def reward_stats(
    scores: Sequence[Mapping[str, Score]], groups: Sequence[str], functions: Sequence[RewardFunction]
) -> dict[str, float]:
    """Return the metrics `reward/<name>/...` of every reward function, including functions with weight 0.

    The metrics describe scores before clipping and weighting. `group_std_mean` uses only groups with at least two valid
    scores. `failed` counts failed and missing scores. Undefined metrics are omitted.
    """
    stats: dict[str, float] = {}
    for function in functions:
        values = {i: v for i, s in enumerate(scores) if (v := _score_value(s, function)) is not None}
        seconds = [s[function.name].seconds for s in scores if function.name in s]
        group_stds = [_stable_std(values[i] for i in m) for m in _group_members(values, groups).values() if len(m) >= 2]
        function_stats = {"failed": float(len(scores) - len(values))}
        if values:
            function_stats |= {
                "mean": _stable_mean(values.values()),
                "std": _stable_std(values.values()),
                "min": min(values.values()),
                "max": max(values.values()),
                "clipped_fraction": _stable_mean(float(_clip_value(v, function.clip) != v) for v in values.values()),
            }
        if group_stds:
            function_stats["group_std_mean"] = _stable_mean(group_stds)
        if seconds:
            function_stats["seconds_mean"] = _stable_mean(seconds)
        stats |= {f"reward/{function.name}/{stat}": value for stat, value in function_stats.items()}
    return stats


def reward_warnings(stats: Mapping[str, float], functions: Sequence[RewardFunction], num_samples: int) -> list[str]:
    """Return warnings about weighted rewards that are constant or mostly clipped. stats: result of reward_stats."""
    warnings = []
    for name in (f.name for f in functions if f.weight != 0):
        known = num_samples - int(stats[f"reward/{name}/failed"])
        if known >= 2 and stats[f"reward/{name}/min"] == stats[f"reward/{name}/max"]:
            value = stats[f"reward/{name}/mean"]
            warnings.append(f"reward {name} is {value:g} for all {known} samples: it gives no training signal")
        clipped = stats.get(f"reward/{name}/clipped_fraction", 0.0)
        if clipped > CLIP_WARNING_FRACTION:
            warnings.append(f"reward {name}: {clipped:.0%} of the scores are clipped. Widen its clip range")
    if stats.get("reward/total/clipped_fraction", 0.0) > CLIP_WARNING_FRACTION:
        warnings.append(f"reward.clip: {stats['reward/total/clipped_fraction']:.0%} of totals are clipped. Widen it")
    return warnings


def _group_members(valid: Iterable[int], groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for i in valid:
        members[groups[i]].append(i)
    return members


# Values are sorted before summation, so that the order of the samples does not change the rounding of the result.
def _stable_mean(values: Iterable[float]) -> float:
    return float(np.mean(np.sort(np.fromiter(values, np.float64))))


def _stable_std(values: Iterable[float], unbiased: bool = False) -> float:
    return float(np.std(np.sort(np.fromiter(values, np.float64)), ddof=int(unbiased)))
