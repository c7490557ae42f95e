"""A reward that can be hacked: it prefers bold digits to well-written ones."""

from __future__ import annotations

from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score

WHITE = 255.0


class Bold(Reward):
    """Mean brightness of the image, 0 to 1. Digits are bright on black, .3 on average; a white image scores highest."""

    name = "bold"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"bold": Range(0.0, 1.0)}
    primary_output = "bold"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._brightness(item) for item in batch]

    def _brightness(self, item: MediaItem) -> Score:
        return item.score(float(item.frames[0].mean()) / WHITE)
