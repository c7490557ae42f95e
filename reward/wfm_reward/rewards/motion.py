"""Motion of a video: a reward that needs no model, for tests and dry runs."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np

from wfm_reward.base import ItemReward, MediaItem, Range, Score


class Motion(ItemReward):
    """Mean absolute difference between consecutive frames, with channels scaled to 0..1. It is largest for noise."""

    name = primary_output = "motion"
    media_types = frozenset({"video"})
    outputs: ClassVar = {"motion": Range(0.0, 1.0)}

    def score_item(self, item: MediaItem) -> Score:
        frames = item.frames
        if len(frames) < 2:
            return item.fail("a video of one frame has no motion")
        # One pair at a time, to not use several times the memory of the clip.
        steps = [np.abs(after.astype(np.int16) - before).mean() for before, after in itertools.pairwise(frames)]
        return item.score(float(np.mean(steps)) / 255.0)
