"""The video quickstart's judge, which RL never sees: which real clip does the video look like, and how much?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.moving_world import cells_of, nearest

REAL = 0.01  # mean squared difference below which a video is taken for a real clip: 3 wrong cells in its 5 frames
MAX_PSNR = 60.0


class NearestClip(Reward):
    """1.0 if the real clip that the video is nearest to has the shape asked for, else 0.0.

    Parts: `direction`, the same of the direction; `both`; `psnr`, the ratio in dB of the brightest cell to the
    difference from that clip, at most 60; `real`, 1.0 if the mean squared difference is below .01. Metadata: `shape`,
    `direction`.
    """

    name = "nearest_clip"
    media = frozenset({"video"})
    outputs: ClassVar = {part: Range(0.0, 1.0) for part in ("shape", "direction", "both", "real")} | {
        "psnr": Range(0.0, MAX_PSNR)
    }
    primary = "shape"
    needs = ("shape", "direction")

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        try:
            clip, error = nearest(cells_of(item.frames))
        except ValueError as reason:
            return item.failed(str(reason))
        shape, direction = clip.shape == item.metadata["shape"], clip.direction == item.metadata["direction"]
        return item.scored(
            float(shape),
            direction=float(direction),
            both=float(shape and direction),
            psnr=min(MAX_PSNR, -10 * float(np.log10(error + 1e-12))),
            real=float(error < REAL),
        )
