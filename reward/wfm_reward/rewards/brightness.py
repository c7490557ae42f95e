"""Reward of the action quickstart: does the brightness follow the actions?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.brightness_demo import MOVE_RAMP, decode_moves, measure_moves, measure_pixel_changes

MAX_RESIDUAL = 10.0  # upper bound of `residual`, in steps


class BrightnessFollowing(Reward):
    """Fraction of moves that the video follows, minus the mean distance of its pixels from the nearest ideal frame.

    The unit of the distance is BRIGHTNESS_STEP. Parts: `following` is the fraction. `residual` is the distance. `still`
    is the fraction of "unchanged" moves that the video follows, and is missing if there are no such moves.
    """

    name = "brightness"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        "brightness": Range(-MAX_RESIDUAL, 1.0),
        "following": Range(0.0, 1.0),
        "residual": Range(0.0, MAX_RESIDUAL),
        "still": Range(0.0, 1.0),
    }
    primary_output = "brightness"
    required_inputs = ("actions",)

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score_item(item) for item in batch]

    def _score_item(self, item: MediaItem) -> Score:
        try:
            target, measured = decode_moves(item.inputs["actions"]), measure_moves(item.frames)
        except ValueError as error:
            return item.fail(str(error))
        moves = np.rint(np.clip(measured, -1, 1))
        right = moves == target
        residual = float(np.abs(measure_pixel_changes(item.frames) - np.outer(moves, MOVE_RAMP)[..., None]).mean())
        parts = {"following": float(right.mean()), "residual": residual}
        if (target == 0).any():
            parts["still"] = float(right[target == 0].mean())
        return item.score(parts["following"] - residual, **parts)
