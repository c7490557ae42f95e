"""A judge that can be fooled: it takes a bold digit for a well written one."""

from __future__ import annotations

from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score

WHITE = 255.0


class Bold(Reward):
    """Mean brightness of the picture, 0 to 1: digits are bright on black, .3 in the mean, and it likes white best."""

    name = "bold"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"bold": Range(0.0, 1.0)}
    primary_output = "bold"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        return item.score(float(item.frames[0].mean()) / WHITE)
