"""Reward for videos that start without a jump, do not flicker and keep their sharpness."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, Score

FULL_SCORE_DB = 40.0  # PSNR at which the second frame continues the first without a visible jump
MAX_DB = 60.0
NEGLIGIBLE = 1e-4  # brightness differences (0..1) below this count as zero


class Consistency(ItemReward):
    """Mean of start continuity, steadiness and sharpness, each from 0 to 1. Needs at least three frames and no model.

    The reward also reports its three terms. `start` is the PSNR between the first two frames divided by 40 dB, and
    `start_db` is this PSNR in dB. `steadiness` is low for flicker. `sharpness` compares the mean spatial gradients of
    the first third and the last third of the frames: the smaller mean divided by the larger mean. It is low for videos
    that drift into blur or noise.
    """

    name = primary_output = "consistency"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        **dict.fromkeys(("consistency", "start", "steadiness", "sharpness"), Range(0.0, 1.0)),
        "start_db": Range(0.0, MAX_DB),
    }

    def score_item(self, item: MediaItem) -> Score:
        frames = np.divide(item.frames, 255, dtype=np.float32)
        if len(frames) < 3:
            return item.fail(f"the video has {len(frames)} frames; at least three are needed")
        decibels = psnr_db(frames[0], frames[1])
        parts = {
            "start": min(1.0, decibels / FULL_SCORE_DB),
            "steadiness": motion_steadiness(frames),
            "sharpness": sharpness_ratio(frames),
        }
        return item.score(float(np.mean(list(parts.values()))), **parts, start_db=decibels)


def psnr_db(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    """Return the PSNR in dB, at most 60, of two images with pixels in 0..1."""
    error = float(np.square(a - b).mean())
    return float(min(MAX_DB, -10 * np.log10(max(error, 1e-12))))


def motion_steadiness(frames: npt.NDArray[np.float32]) -> float:
    """Return 1 - b / (2 * a), at least 0, for frames [T,H,W,3] with T > 2.

    a and b are the mean absolute first and second differences between consecutive frames. The value is 1 for steady
    motion or no motion, and 0 for frames that alternate.
    """
    first = float(np.abs(np.diff(frames, axis=0)).mean())
    second = float(np.abs(np.diff(frames, n=2, axis=0)).mean())
    return 1.0 if first < NEGLIGIBLE else float(np.clip(1 - second / (2 * first), 0, 1))


def sharpness_ratio(frames: npt.NDArray[np.float32]) -> float:
    """Compare the mean gradients of the first third and the last third of frames [T,H,W,3].

    Returns the smaller mean divided by the larger mean, 0 to 1.
    """
    third = max(1, len(frames) // 3)
    first, last = mean_gradient(frames[:third]), mean_gradient(frames[-third:])
    if max(first, last) < NEGLIGIBLE:
        return 1.0
    return min(first, last) / max(first, last)


def mean_gradient(frames: npt.NDArray[np.float32]) -> float:
    """Return the mean absolute difference of neighbouring pixels in frames [T,H,W,3]."""
    gradients = [np.abs(np.diff(frames, axis=axis)) for axis in (1, 2) if frames.shape[axis] > 1]
    return float(np.mean([gradient.mean() for gradient in gradients])) if gradients else 0.0
