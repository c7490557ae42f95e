"""Metrics of an evaluation during training, computed from the scores of its samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from wfm_ds.evaluation.clip_curves import clip_curve, scores_by_clip
from wfm_ds.evaluation.paired_statistics import estimate_mean
from wfm_ds.evaluation.recordings import RECORDING
from wfm_ds.evaluation.results import scores_by_reward
from wfm_ds.types import Score


def order_by_prompt(scores: Sequence[Mapping[str, Score]], num_seeds: int) -> list[Mapping[str, Score]]:
    """Reorder scores from seed-major to prompt-major order.

    Seed-major order starts with all prompts of the first seed, prompt-major order with all seeds of the first prompt.
    """
    num_prompts = len(scores) // num_seeds
    return [scores[seed * num_prompts + prompt] for prompt in range(num_prompts) for seed in range(num_seeds)]


def reward_metrics(
    samples: Sequence[Mapping[str, Score]], num_seeds: int, held_out_rewards: Collection[str] = ()
) -> dict[str, float]:
    """Return `val/reward/<name>/mean`, `val/reward/<name>/ci95` and `val/reward/<name>/failed` for each reward.

    `ci95` is half the width of the 95 % confidence interval of the mean over prompts. `failed` is the number of failed
    scores. Held-out rewards have the prefix `val/held_out/<name>/` instead, and the similarity to recordings has the
    prefix `val/recording/<name>/`. samples: scores in prompt-major order.
    """
    metrics: dict[str, float] = {}
    for tag, values in sorted(scores_by_reward(samples, num_seeds).items()):
        prefix = metric_prefix(tag, held_out_rewards)
        mean = estimate_mean(values)
        if mean is not None:
            metrics[f"{prefix}/mean"] = mean.value
        if mean is not None and mean.half_width is not None:
            metrics[f"{prefix}/ci95"] = mean.half_width
        if tag in samples[0]:
            metrics[f"{prefix}/failed"] = float(sum(s[tag].failure is not None for s in samples))
    return metrics


def clip_metrics(
    clips: Sequence[Sequence[Mapping[str, Score]]], num_seeds: int, held_out_rewards: Collection[str] = ()
) -> dict[str, float]:
    """Return `val/reward/<name>/clip_<k>` for each reward and clip, and `val/reward/<name>/drift`.

    `drift` is the mean difference between the last clip and the first clip of the same sample. The prefixes are the
    same as in `reward_metrics`. clips: for each clip, the scores of all samples in prompt-major order.
    """
    metrics: dict[str, float] = {}
    for tag, scores in sorted(scores_by_clip(clips, num_seeds).items()):
        prefix, curve = metric_prefix(tag, held_out_rewards), clip_curve(scores)
        metrics |= {f"{prefix}/clip_{k:02}": mean.value for k, mean in enumerate(curve.means, 1) if mean is not None}
        if curve.drifts and (drift := curve.drifts[-1]) is not None:
            metrics[f"{prefix}/drift"] = drift.value
    return metrics


def metric_prefix(tag: str, held_out_rewards: Collection[str]) -> str:
    """Return the metric prefix of a reward, a part of a reward (`reward/part`), or a similarity to recordings."""
    if tag.startswith(f"{RECORDING}/"):
        return f"val/{tag}"
    is_held_out = any(tag == name or tag.startswith(f"{name}/") for name in held_out_rewards)
    return f"val/{'held_out' if is_held_out else 'reward'}/{tag}"


def correlation_metrics(
    evaluated: Sequence[Mapping[str, Score]], rolled_out: Sequence[Mapping[str, Score]], prompts: Sequence[str]
) -> dict[str, float]:
    """Compare the rewards of evaluation samples with the rewards of rollout samples for the same prompts and seeds.

    Returns three metrics per reward, with the prefix `val/reward/<name>/`. `rollout_mean` is the mean reward of the
    rollout samples. `rank_correlation` is computed over all pairs of samples. `rank_correlation_within_prompts` is
    computed per prompt and then averaged.
    """
    metrics: dict[str, float] = {}
    for name in sorted(rolled_out[0]):  # held-out rewards do not score rollouts
        values = [(e[name].value, r[name].value, p) for e, r, p in zip(evaluated, rolled_out, prompts, strict=True)]
        pairs = [(a, b, prompt) for a, b, prompt in values if a is not None and b is not None]
        if not pairs:
            continue
        by_prompt = [[(a, b) for a, b, other in pairs if other == prompt] for prompt in dict.fromkeys(prompts)]
        within_prompts = [rho for part in by_prompt if (rho := rank_correlation(part)) is not None]
        overall = rank_correlation([(a, b) for a, b, _ in pairs])
        metrics[f"val/reward/{name}/rollout_mean"] = float(np.mean([b for _, b, _ in pairs]))
        if overall is not None:
            metrics[f"val/reward/{name}/rank_correlation"] = overall
        if within_prompts:
            metrics[f"val/reward/{name}/rank_correlation_within_prompts"] = float(np.mean(within_prompts))
    return metrics


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of (x, y) pairs. Equal values get the mean of their ranks.

    Returns None for fewer than two pairs, and if all x or all y are equal.
    """
    if len(pairs) < 2:
        return None
    first, second = (mean_ranks(side) for side in np.asarray(pairs, np.float64).T)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rank of each value, starting at 1. Equal values get the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return ranks
