"""Scores of each clip of long videos.

The drift in clip k is the score of clip k minus the score of the first clip of the same video.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wfm_ds.evaluation.paired_statistics import Array, MeanEstimate, estimate_mean
from wfm_ds.evaluation.results import SampleScores, scores_by_reward
from wfm_ds.types import Score
from wfm_reward.frames import mean_score


@dataclass(frozen=True, slots=True)
class ClipCurve:
    """Estimates of one score for each clip of a video. An estimate is None if all scores of the clip are missing."""

    means: Sequence[MeanEstimate | None]
    drifts: Sequence[MeanEstimate | None]  # from the second clip to the last


def clip_curve(scores: Sequence[Array]) -> ClipCurve:
    """Return the curve of a score. scores: one array [P prompts, S seeds] for each clip."""
    return ClipCurve([estimate_mean(one) for one in scores], [estimate_mean(one - scores[0]) for one in scores[1:]])


def scores_by_clip(clips: Sequence[SampleScores], num_seeds: int) -> dict[str, list[Array]]:
    """Return {score name: one array [P prompts, S seeds] for each clip}, with the score names of scores_by_reward.

    clips: for each clip, the scores of all samples. Missing values become NaN.
    """
    by_clip = [scores_by_reward(samples, num_seeds) for samples in clips]
    names = dict.fromkeys(name for scores in by_clip for name in scores)
    missing = np.full((len(clips[0]) // num_seeds, num_seeds), np.nan) if clips else np.empty(0)
    return {name: [scores.get(name, missing) for scores in by_clip] for name in names}


def average_clips(clips: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    """Return the mean of each score over the clips of a sample.

    If a score failed in any clip, the mean is a failed score. Each entry of Score.parts is averaged over the clips that
    have it.
    """
    if len(clips) == 1:
        return dict(clips[0])
    labels, means = [f"clip {k}" for k in range(1, len(clips) + 1)], {}
    for name in clips[0]:
        scores = [clip[name] for clip in clips]
        means[name] = mean_score(scores, labels, dict.fromkeys(part for score in scores for part in score.parts))
    return means
