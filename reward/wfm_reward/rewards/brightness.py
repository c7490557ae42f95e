"""The action quickstart's reward: does the frame become brighter and darker when it is told to?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.brightness_world import RAMP, changes, moves_of, pixel_changes

MOST = 10.0  # steps of brightness from black to white


class Brightness(Reward):
    """Share of the presses that are followed, less the mean distance of a frame's pixels from one that the nearest of
    the three moves leads through, in steps.

    Parts: `following`, the share alone; `residual`, that distance; `still`, the share of the presses to stay as it is
    that are followed, where there are any.
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
            wanted, found = moves_of(item.inputs["actions"]), changes(item.frames)
        except ValueError as error:
            return item.failed(str(error))
        seen = np.rint(np.clip(found, -1, 1))
        right = seen == wanted
        residual = float(np.abs(pixel_changes(item.frames) - np.outer(seen, RAMP)[..., None]).mean())
        parts = {"following": float(right.mean()), "residual": residual}
        if (wanted == 0).any():
            parts["still"] = float(right[wanted == 0].mean())
        return item.scored(parts["following"] - residual, **parts)
