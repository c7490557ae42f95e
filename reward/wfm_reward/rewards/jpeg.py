"""Compressibility of an image, the two rewards of DDPO (arXiv 2305.13301): without a model, so they run anywhere."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score

QUALITY = 95
UNBOUNDED = float("inf")


def jpeg_kb(item: MediaItem) -> float:
    """Size of the item's (first) image as a JPEG of quality 95, in units of 1000 bytes."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(item.frames[0]).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class JpegReward(Reward):
    """A function of the JPEG size."""

    media = frozenset({"image"})
    backbone = "JPEG"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [item.scored(self.value(jpeg_kb(item))) for item in batch]

    @abstractmethod
    def value(self, size_kb: float) -> float: ...


class JpegIncompressibility(JpegReward):
    """The size in KB: detail is rewarded."""

    name = "jpeg_incompressibility"
    outputs: ClassVar = {"jpeg_incompressibility": Range(0.0, UNBOUNDED)}
    primary = "jpeg_incompressibility"

    def value(self, size_kb: float) -> float:
        return size_kb


class JpegCompressibility(JpegReward):
    """Minus the size in units of 500 KB: smoothness is rewarded."""

    name = "jpeg_compressibility"
    outputs: ClassVar = {"jpeg_compressibility": Range(-UNBOUNDED, 0.0)}
    primary = "jpeg_compressibility"

    def value(self, size_kb: float) -> float:
        return -size_kb / 500
