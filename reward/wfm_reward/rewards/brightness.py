"""Reward of the action quickstart: does the brightness follow the actions?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.brightness_world import RAMP, changes, moves_of, pixel_changes

MOST = 10.0  # upper bound of `residual`, in steps


class Brightness(Reward):
    """Fraction of moves that the video follows, minus the mean pixel distance to the nearest ideal frame.

    The distance is measured in brightness steps. Parts: `following`, the fraction; `residual`, the distance; `still`,
    the fraction for "unchanged" moves, if there are any.
    """

    name = "brightness"
    media = frozenset({"video"})
    outputs: ClassVar = {
        "brightness": Range(-MOST, 1.0),
        "following": Range(0.0, 1.0),
        "residual": Range(0.0, MOST),
        "still": Range(0.0, 1.0),
    }
    primary = "brightness"
    needs_inputs = ("actions",)

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        try:
            target, measured = moves_of(item.inputs["actions"]), changes(item.frames)
        except ValueError as error:
            return item.failed(str(error))
        moves = np.rint(np.clip(measured, -1, 1))
        right = moves == target
        residual = float(np.abs(pixel_changes(item.frames) - np.outer(moves, RAMP)[..., None]).mean())
        parts = {"following": float(right.mean()), "residual": residual}
        if (target == 0).any():
            parts["still"] = float(right[target == 0].mean())
        return item.scored(parts["following"] - residual, **parts)
