"""A number that says nothing about the media, for a dry run of a recipe whose real rewards are not there yet."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score


class Mock(Reward):
    """A pseudo-random number in [0, 1) that follows from the bytes of the media alone: it teaches nothing."""

    name = "mock"
    media = frozenset({"image", "video"})
    outputs: ClassVar = {"mock": Range(0.0, 1.0)}
    primary = "mock"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [item.scored(mock_value(item)) for item in batch]


def mock_value(item: MediaItem) -> float:
    digest = hashlib.blake2b(repr(item.frames.shape).encode(), digest_size=6)
    digest.update(item.frames.tobytes())
    return int.from_bytes(digest.digest(), "little") / 2**48
