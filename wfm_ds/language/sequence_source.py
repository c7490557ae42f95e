"""Reader of the packed sequences of each training step. It reads one step ahead."""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wfm_ds.data.order import epoch_order, permutation
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import BadConversation
from wfm_ds.language.data import LanguageData
from wfm_ds.language.packed_sequences import ConversationReader, ConversationSample
from wfm_ds.seeds import derive_seed

WINDOW = 1024  # number of consecutive conversations of an epoch that are packed together


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
        """Return the indices of the conversations in the sequence at this position, counted from 0."""
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
            # Packing has sorted the conversations by length, so restore a random or the original order.
            random_order = permutation(len(bins), derive_seed(self.seed, "row_order", epoch, start)).tolist()
            order_in_window = (
                random_order if self.shuffle else sorted(range(len(bins)), key=lambda bin_index: min(bins[bin_index]))
            )
            sequences += [[window[offset] for offset in sorted(bins[bin_index])] for bin_index in order_in_window]
        return sequences


log = logging.getLogger(__name__)

READ_TIMEOUT_S = 300.0
MIN_TRIED = 100  # minimum denominator of the bad fraction, so that one bad conversation does not end a new run


@dataclass(frozen=True, slots=True)
class StepSequences:
    """The sequences of this rank in one step, and the number of skipped conversations."""

    sequences: list[list[ConversationSample]]
    num_bad: int
    num_tried: int


class SequenceSource:
    """Reads the packed sequences of one rank. Conversations with unreadable images or videos are skipped."""

    def __init__(
        self,
        data: LanguageData,
        order: PackingOrder,
        reader: ConversationReader,
        *,
        sequences_per_step: int,
        workers: int,
    ) -> None:
        self._data, self._order, self._reader = data.training, order, reader
        self._sequences_per_step = sequences_per_step
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
        self._ahead: dict[int, list[list[Future[ConversationSample | BadConversation]]]] = {}
        self.tried, self.bad = 0, 0  # over all ranks, from `check_bad_fraction`

    def read_step(self, step: int, rank: int, num_ranks: int) -> StepSequences:
        """Return this rank's sequences of a step (counted from 1). Raises DataError after a timeout."""
        for upcoming in (step, step + 1):
            if upcoming not in self._ahead:
                self._ahead[upcoming] = self._submit(upcoming, rank, num_ranks)
        sequences, num_bad, num_tried = list[list[ConversationSample]](), 0, 0
        for futures in self._ahead.pop(step):
            results = [self._wait_for_result(future) for future in futures]
            sequences.append([result for result in results if isinstance(result, ConversationSample)])
            num_bad += len(results) - len(sequences[-1])
            num_tried += len(results)
        return StepSequences(sequences, num_bad, num_tried)

    def epoch(self, step: int) -> float:
        epoch, _ = self._order.locate(step * self._sequences_per_step - 1)
        return float(epoch)

    def check_bad_fraction(self, bad: int, tried: int, max_bad_fraction: float) -> None:
        """Count a step's unreadable conversations. Raise DataError if there are too many of them so far.

        bad, tried: number of unreadable and of all conversations in the step, summed over all ranks.
        """
        self.bad, self.tried = self.bad + bad, self.tried + tried
        if self.bad > max_bad_fraction * max(self.tried, MIN_TRIED):
            raise DataError(
                f"{self.bad} of {self.tried} conversations have unreadable images or videos (data.max_bad_fraction: "
                f"{max_bad_fraction:g}); "
                "see the log"
            )

    def state_dict(self) -> dict[str, int]:
        return {"bad": self.bad, "tried": self.tried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bad, self.tried = state["bad"], state["tried"]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, step: int, rank: int, num_ranks: int) -> list[list[Future[ConversationSample | BadConversation]]]:
        first = (step - 1) * self._sequences_per_step
        positions = range(first + rank, first + self._sequences_per_step, num_ranks)
        return [
            [self._pool.submit(self._read_conversation, index) for index in self._order.conversations(position)]
            for position in positions
        ]

    def _read_conversation(self, index: int) -> ConversationSample | BadConversation:
        try:
            sample = self._reader.read(self._data.conversations[index])
        except BadConversation as error:
            return error
        if len(sample.tokens) != self._data.lengths[index]:  # packed for a different number of tokens
            return BadConversation("media", sample.id, "the size of an image or video changed since it was measured")
        return sample

    def _wait_for_result(
        self, future: Future[ConversationSample | BadConversation]
    ) -> ConversationSample | BadConversation:
        try:
            result = future.result(READ_TIMEOUT_S)
        except TimeoutError as error:
            raise DataError(f"reading a conversation exceeded {READ_TIMEOUT_S:g} s: check the storage") from error
        if isinstance(result, BadConversation):
            log.warning("skipped %s", result)
        return result
