"""Several training sizes in one run: media of mixed shapes, each cut to the one nearest to its own shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wfm_ds.data.media import media_size
from wfm_ds.data.pixels import BadMedia, Framing
from wfm_ds.data.samples import Media

Size = tuple[int, int]
"""Height and width in pixels."""
# Long to short side of the automatic sizes. Written out here: a run that goes on must find the sizes it began with.
SHAPES = ((1, 1), (5, 4), (4, 3), (3, 2), (16, 9), (2, 1))


def automatic_sizes(height: int, width: int, multiple: int) -> list[Size]:
    """This size, and others of about as many pixels in the usual shapes from 2:1 to 1:2, in multiples of `multiple`."""

    def side(share: float) -> int:
        return multiple * max(1, round(math.sqrt(height * width * share) / multiple))

    pairs = [(side(short / long), side(long / short)) for long, short in SHAPES]
    turned = [(long, short) for short, long in pairs]
    return list(dict.fromkeys([(height, width), *pairs, *turned]))


def nearest(sizes: Sequence[Size], height: int, width: int) -> int:
    """The index of the size whose shape is nearest to this one, by the ratio of their ratios of height to width.

    Of equal shapes the largest that height x width covers is taken, else the smallest; of equally near ones the first.
    """

    def distance(index: int) -> tuple[float, bool, int]:
        h, w = sizes[index]
        ours, theirs = h * width, w * height
        enlarges = h > height or w > width
        return max(ours, theirs) / min(ours, theirs), enlarges, h * w if enlarges else -h * w

    return min(range(len(sizes)), key=distance)


class Buckets:
    """The framings of a run, which differ in height and width alone; each medium has one of them."""

    def __init__(self, framing: Framing, sizes: Sequence[Size]) -> None:
        """`framing`: all of it but the size."""
        self.sizes = list(sizes)
        self.framings = [dataclasses.replace(framing, height=height, width=width) for height, width in sizes]

    def index_of(self, media: Media) -> int:
        """The bucket of this medium; its size is read if there is a choice."""
        if len(self.sizes) == 1:
            return 0
        try:
            return nearest(self.sizes, *media_size(media))
        except BadMedia:
            return 0  # it fails in the same way when it is decoded, and is counted there

    def framing_of(self, media: Media) -> Framing:
        return self.framings[self.index_of(media)]
