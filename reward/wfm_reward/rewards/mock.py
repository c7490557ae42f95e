"""Mock reward, for dry runs of recipes before the real rewards are available."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score


class Mock(Reward):
    """Pseudo-random number in [0, 1), computed as a hash of the pixels. A model cannot learn from it."""

    name = "mock"
    media_types = frozenset({"image", "video"})
    outputs: ClassVar = {"mock": Range(0.0, 1.0)}
    primary_output = "mock"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [item.score(mock_value(item)) for item in batch]


def mock_value(item: MediaItem) -> float:
    digest = hashlib.blake2b(repr(item.frames.shape).encode(), digest_size=6)
    digest.update(item.frames.tobytes())
    return int.from_bytes(digest.digest(), "little") / 2**48
