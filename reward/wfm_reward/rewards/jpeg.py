"""JPEG compressibility and incompressibility, the rewards of DDPO (arXiv 2305.13301). They need no model."""

from __future__ import annotations

import io
from typing import ClassVar

from wfm_reward.base import ItemReward, MediaItem, Range, Score

QUALITY = 95
UNBOUNDED = float("inf")


def jpeg_kb(item: MediaItem) -> float:
    """Return the size in kB (1000 bytes) of the first frame as a JPEG of quality 95."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(item.frames[0]).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class JpegIncompressibility(ItemReward):
    """JPEG size in kB. It rewards detail."""

    name = primary_output = "jpeg_incompressibility"
    media_types = frozenset({"image"})
    backbone = "JPEG"
    outputs: ClassVar = {"jpeg_incompressibility": Range(0.0, UNBOUNDED)}

    def score_item(self, item: MediaItem) -> Score:
        return item.score(jpeg_kb(item))


class JpegCompressibility(ItemReward):
    """Negative JPEG size in units of 500 kB. It rewards smooth images."""

    name = primary_output = "jpeg_compressibility"
    media_types = frozenset({"image"})
    backbone = "JPEG"
    outputs: ClassVar = {"jpeg_compressibility": Range(-UNBOUNDED, 0.0)}

    def score_item(self, item: MediaItem) -> Score:
        return item.score(-jpeg_kb(item) / 500)
