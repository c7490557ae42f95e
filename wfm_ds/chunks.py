"""Split sequences and ranges into consecutive chunks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def split_into_chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def even_ranges(count: int, parts: int) -> list[range]:
    """Split range(count) into `parts` consecutive ranges. Lengths differ by at most one; longer ranges come first."""
    size, longer = divmod(count, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
