"""JPEG compressibility and incompressibility, the rewards of DDPO (arXiv 2305.13301). They need no model."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score

QUALITY = 95
UNBOUNDED = float("inf")


def jpeg_kb(item: MediaItem) -> float:
    """Return the size in kB (1000 bytes) of the first frame as a JPEG of quality 95."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(item.frames[0]).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class JpegReward(Reward):
    """Base class of rewards that depend only on the size of the image as a JPEG file."""

    media_types = frozenset({"image"})
    backbone = "JPEG"

    def score(self, batch: MediaBatch) -> list[Score]:
        return [item.score(self.score_size(jpeg_kb(item))) for item in batch]

    @abstractmethod
    def score_size(self, size_kb: float) -> float: ...


class JpegIncompressibility(JpegReward):
    """JPEG size in kB. It rewards detail."""

    name = "jpeg_incompressibility"
    outputs: ClassVar = {"jpeg_incompressibility": Range(0.0, UNBOUNDED)}
    primary_output = "jpeg_incompressibility"

    def score_size(self, size_kb: float) -> float:
        return size_kb


class JpegCompressibility(JpegReward):
    """Negative JPEG size in units of 500 kB. It rewards smooth images."""

    name = "jpeg_compressibility"
    outputs: ClassVar = {"jpeg_compressibility": Range(-UNBOUNDED, 0.0)}
    primary_output = "jpeg_compressibility"

    def score_size(self, size_kb: float) -> float:
        return -size_kb / 500
