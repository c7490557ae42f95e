"""Consistency of a video with its own start: what a reward for following actions does not see, and may be paid with."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score

BEST_DB = 40.0  # PSNR from which the second frame goes on from the first without a seam
MAX_DB = 60.0
NEXT_TO_NONE = 1e-4  # of brightness in 0..1


class Consistency(Reward):
    """Mean of three guards in 0..1, for videos of three frames and more. No model.

    `start`: the PSNR of the second frame to the first, which is often a given one, over 40 dB. `steadiness`: 1 - half
    of |second differences in time| / |first differences|: motion that goes on changes little, flicker twice what it is.
    `sharpness`: mean |gradient in space| of the last third of the frames over that of the first third, the smaller by
    the larger: inverse dynamics is content with a blur, and a model that drifts ends in one, or in noise. Parts besides
    these: `start_db`.
    """

    name = "consistency"
    media = frozenset({"video"})
    outputs: ClassVar = {
        **dict.fromkeys(("consistency", "start", "steadiness", "sharpness"), Range(0.0, 1.0)),
        "start_db": Range(0.0, MAX_DB),
    }
    primary = "consistency"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        frames = np.divide(item.frames, 255, dtype=np.float32)
        if len(frames) < 3:
            return item.failed(f"the video has {len(frames)} frames, and flicker shows in three")
        decibels = psnr(frames[0], frames[1])
        parts = {
            "start": min(1.0, decibels / BEST_DB),
            "steadiness": steadiness(frames),
            "sharpness": kept_sharpness(frames),
        }
        return item.scored(float(np.mean(list(parts.values()))), **parts, start_db=decibels)


def psnr(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return 10 log10(1 / mean squared difference) in dB, at most 60, of pictures in 0..1."""
    error = float(np.square(one - other).mean())
    return float(min(MAX_DB, -10 * np.log10(max(error, 1e-12))))


def steadiness(frames: npt.NDArray[np.float32]) -> float:
    """Return 1 - |second differences| / (2 |first differences|) of frames [T,H,W,3], T > 2: 1 for steady change or
    none, 0 for frames that alternate."""
    first = float(np.abs(np.diff(frames, axis=0)).mean())
    second = float(np.abs(np.diff(frames, n=2, axis=0)).mean())
    return 1.0 if first < NEXT_TO_NONE else float(np.clip(1 - second / (2 * first), 0, 1))


def kept_sharpness(frames: npt.NDArray[np.float32]) -> float:
    """Return the sharpness of the last third of frames [T,H,W,3] over that of the first third, or its inverse."""
    third = max(1, len(frames) // 3)
    first, last = sharpness(frames[:third]), sharpness(frames[-third:])
    if max(first, last) < NEXT_TO_NONE:
        return 1.0
    return min(first, last) / max(first, last)


def sharpness(frames: npt.NDArray[np.float32]) -> float:
    """Return the mean difference of neighbouring pixels, down and across, of frames [T,H,W,3]."""
    sides = [np.abs(np.diff(frames, axis=axis)) for axis in (1, 2) if frames.shape[axis] > 1]
    return float(np.mean([side.mean() for side in sides])) if sides else 0.0
