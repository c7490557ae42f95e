"""Colour match: a reward that needs no model, for tests and first steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wfm_reward.base import ItemReward, MediaItem, Range, Score

COLORS = {
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
}
COLOR_WORD = re.compile(rf"\b({'|'.join(COLORS)})\b", re.IGNORECASE)


class ColorMatch(ItemReward):
    """1 minus the mean absolute distance of the pixels from a target colour, with channels scaled to 0..1.

    The target colour is the metadata `target_rgb`, three numbers from 0 to 255. If it is missing, the target is the
    first colour word of the prompt.
    """

    name = primary_output = "color"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"color": Range(0.0, 1.0)}

    def score_item(self, item: MediaItem) -> Score:
        target = item.metadata.get("target_rgb")
        if target is None:
            word = COLOR_WORD.search(item.prompt)
            if word is None:
                return item.fail(f"no target_rgb in the metadata and none of {', '.join(COLORS)} in the prompt")
            target = COLORS[word[1].lower()]
        elif not is_rgb(target):
            return item.fail(f"the metadata `target_rgb` is {target!r}, not three numbers from 0 to 255")
        distance = np.abs(item.frames[0].astype(np.float64) - np.asarray(target, np.float64)).mean() / 255.0
        return item.score(1.0 - float(distance))


def is_rgb(target: object) -> bool:
    if not isinstance(target, Sequence) or isinstance(target, str | bytes) or len(target) != 3:
        return False
    return all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 255 for v in target)
