"""Held-out reward of the video quickstart: similarity to the nearest real clip."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.moving_demo import find_nearest_clip, measure_cells

MAX_REAL_ERROR = 0.01  # maximum mean squared error of a real clip: 3 wrong cells in 5 frames
MAX_PSNR = 60.0


class NearestClip(Reward):
    """PSNR in dB, at most 60, between the video and the nearest real clip.

    Both are compared as grids of large square cells. Parts, each 0.0 or 1.0: `shape` and `direction` are 1.0 if the
    nearest clip has the requested shape or direction. `both` is 1.0 if it has both. `real` is 1.0 if the mean squared
    error is below .01. Metadata: `shape` and `direction`.
    """

    name = "nearest_clip"
    media_types = frozenset({"video"})
    outputs: ClassVar = {part: Range(0.0, 1.0) for part in ("shape", "direction", "both", "real")} | {
        "psnr": Range(0.0, MAX_PSNR)
    }
    primary_output = "psnr"
    required_metadata = ("shape", "direction")

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score_item(item) for item in batch]

    def _score_item(self, item: MediaItem) -> Score:
        try:
            clip, error = find_nearest_clip(measure_cells(item.frames))
        except ValueError as reason:
            return item.fail(str(reason))
        shape, direction = clip.shape == item.metadata["shape"], clip.direction == item.metadata["direction"]
        return item.score(
            min(MAX_PSNR, -10 * float(np.log10(error + 1e-12))),
            shape=float(shape),
            direction=float(direction),
            both=float(shape and direction),
            real=float(error < MAX_REAL_ERROR),
        )
