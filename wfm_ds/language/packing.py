"""Packing of conversations into sequences. The result depends only on their lengths, not on ranks or previous steps."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

from wfm_ds.data.order import epoch_order, permutation
from wfm_ds.seeds import derive_seed

WINDOW = 1024  # packing window in an epoch's order; keeps distant conversations apart


def pack_items(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins by best-fit decreasing. Return the item indices of each bin.

    lengths: length of each item, at most `capacity`.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free capacity, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect.bisect_left(free, (lengths[item], -1))
        capacity_left, bin_index = free.pop(slot) if slot < len(free) else (capacity, len(bins))
        if bin_index == len(bins):
            bins.append([])
        bins[bin_index].append(item)
        bisect.insort(free, (capacity_left - lengths[item], bin_index))
    return bins


class PackingOrder:
    """An infinite order of packed sequences. Conversations are reshuffled and repacked in every epoch."""

    def __init__(self, lengths: Sequence[int], capacity: int, *, seed: int, shuffle: bool, pack: bool) -> None:
        """lengths: number of tokens of each conversation, at most `capacity`."""
        self.lengths, self.capacity, self.seed, self.shuffle, self.pack = lengths, capacity, seed, shuffle, pack
        self._cached_epoch = functools.lru_cache(maxsize=2)(self._pack_epoch)
        self._ends: list[int] = []  # number of sequences up to the end of each epoch

    def conversations(self, position: int) -> list[int]:
        """Return the indices of the conversations in the sequence at this position. Positions count from 0."""
        epoch, offset = self.locate(position)
        return self._cached_epoch(epoch)[offset]

    def locate(self, position: int) -> tuple[int, int]:
        """Return (epoch, offset within the epoch) of the sequence at this position."""
        while not self._ends or self._ends[-1] <= position:
            previous = self._ends[-1] if self._ends else 0
            self._ends.append(previous + len(self._cached_epoch(len(self._ends))))
        epoch = bisect.bisect_right(self._ends, position)
        return epoch, position - (self._ends[epoch - 1] if epoch else 0)

    def _pack_epoch(self, epoch: int) -> list[list[int]]:
        count = len(self.lengths)
        order = epoch_order(count, self.seed, epoch).tolist() if self.shuffle else list(range(count))
        if not self.pack:
            return [[item] for item in order]
        sequences: list[list[int]] = []
        for start in range(0, count, WINDOW):
            window = order[start : start + WINDOW]
            bins = pack_items([self.lengths[item] for item in window], self.capacity)
            # Packing sorts by length; restore a training order.
            random_order = permutation(len(bins), derive_seed(self.seed, "row_order", epoch, start)).tolist()
            order_in_window = (
                random_order if self.shuffle else sorted(range(len(bins)), key=lambda bin_index: min(bins[bin_index]))
            )
            sequences += [[window[offset] for offset in sorted(bins[bin_index])] for bin_index in order_in_window]
        return sequences
