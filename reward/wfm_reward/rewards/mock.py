"""Mock reward, for dry runs of recipes before the real rewards are available."""

from __future__ import annotations

import hashlib
from typing import ClassVar

from wfm_reward.base import ItemReward, MediaItem, Range, Score


class Mock(ItemReward):
    """Pseudo-random number in [0, 1), computed as a hash of the pixels. A model cannot learn from it."""

    name = primary_output = "mock"
    media_types = frozenset({"image", "video"})
    outputs: ClassVar = {"mock": Range(0.0, 1.0)}

    def score_item(self, item: MediaItem) -> Score:
        digest = hashlib.blake2b(repr(item.frames.shape).encode(), digest_size=6)
        digest.update(item.frames.tobytes())
        return item.score(int.from_bytes(digest.digest(), "little") / 2**48)
