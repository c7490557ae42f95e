"""Aspect-ratio buckets: each image or video is cropped to the training size that fits best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wfm_ds.data.media import media_size
from wfm_ds.data.pixels import BadMedia, Framing
from wfm_ds.data.samples import Media

ImageSize = tuple[int, int]
"""Height and width in pixels."""
# Long to short side of the automatic sizes. Fixed here because a resumed run must use the same sizes.
ASPECT_RATIOS = ((1, 1), (5, 4), (4, 3), (3, 2), (16, 9), (2, 1))


def automatic_sizes(height: int, width: int, multiple: int) -> list[ImageSize]:
    """Return the given size, then sizes of about the same area with aspect ratios from 2:1 to 1:2.

    The sides of the added sizes are multiples of `multiple`.
    """

    def snap_side(ratio: float) -> int:
        return multiple * max(1, round(math.sqrt(height * width * ratio) / multiple))

    landscape = [(snap_side(short / long), snap_side(long / short)) for long, short in ASPECT_RATIOS]
    portrait = [(long, short) for short, long in landscape]
    return list(dict.fromkeys([(height, width), *landscape, *portrait]))


def nearest_size(sizes: Sequence[ImageSize], height: int, width: int) -> int:
    """Return the index of the size with the aspect ratio nearest to height / width.

    If several sizes are equally near, the largest one that needs no upscaling is chosen. If all of them need upscaling,
    the smallest one is chosen.
    """

    def distance(index: int) -> tuple[float, bool, int]:
        h, w = sizes[index]
        scaled_ratio, target_ratio = h * width, w * height
        enlarges = h > height or w > width
        return (
            max(scaled_ratio, target_ratio) / min(scaled_ratio, target_ratio),
            enlarges,
            h * w if enlarges else -h * w,
        )

    return min(range(len(sizes)), key=distance)


class Buckets:
    """The training sizes (buckets) of a run, with one Framing per size."""

    def __init__(self, framing: Framing, sizes: Sequence[ImageSize]) -> None:
        self.sizes = list(sizes)
        self.framings = [dataclasses.replace(framing, height=height, width=width) for height, width in sizes]

    def choose_bucket(self, media: Media) -> int:
        if len(self.sizes) == 1:
            return 0
        try:
            return nearest_size(self.sizes, *media_size(media))
        except BadMedia:
            return 0  # decoding will fail with the same error and count the file

    def choose_framing(self, media: Media) -> Framing:
        return self.framings[self.choose_bucket(media)]
