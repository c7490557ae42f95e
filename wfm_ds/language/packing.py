"""Rows made of several conversations, by their lengths alone: the same at any number of ranks, at any step."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

from wfm_ds.data.order import epoch_order, permuted
from wfm_ds.seeds import derive_seed

WINDOW = 1024  # conversations that are packed together: what is far apart in an epoch's order stays so


def packed(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into rows of this capacity, best fit and longest first; indices of the items by row.

    Each item must fit a row of its own.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, row), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[item], -1))
        left, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        bisect.insort(room, (left - lengths[item], row))
    return rows


class RowOrder:
    """The endless sequence of rows of a run: epoch after epoch, each in an order of its own."""

    def __init__(self, lengths: Sequence[int], capacity: int, *, seed: int, shuffle: bool, pack: bool) -> None:
        """lengths: tokens of each conversation, at most `capacity`."""
        self.lengths, self.capacity, self.seed, self.shuffle, self.pack = lengths, capacity, seed, shuffle, pack
        self._rows = functools.lru_cache(maxsize=2)(self._of_epoch)
        self._ends: list[int] = []  # rows of all epochs up to this one

    def row(self, position: int) -> list[int]:
        """The conversations of the row at this position, from 0."""
        epoch, offset = self.place(position)
        return self._rows(epoch)[offset]

    def place(self, position: int) -> tuple[int, int]:
        """The epoch of a row, and its number in it."""
        while not self._ends or self._ends[-1] <= position:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._rows(len(self._ends))))
        epoch = bisect.bisect_right(self._ends, position)
        return epoch, position - (self._ends[epoch - 1] if epoch else 0)

    def _of_epoch(self, epoch: int) -> list[list[int]]:
        count = len(self.lengths)
        order = epoch_order(count, self.seed, epoch).tolist() if self.shuffle else list(range(count))
        if not self.pack:
            return [[item] for item in order]
        rows: list[list[int]] = []
        for begin in range(0, count, WINDOW):
            window = order[begin : begin + WINDOW]
            found = packed([self.lengths[item] for item in window], self.capacity)
            # Longest first is how they were packed, and no order to train in.
            shuffled = permuted(len(found), derive_seed(self.seed, "row_order", epoch, begin)).tolist()
            turns = shuffled if self.shuffle else sorted(range(len(found)), key=lambda row: min(found[row]))
            rows += [[window[place] for place in sorted(found[row])] for row in turns]
        return rows
