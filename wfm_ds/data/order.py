"""The order of the training samples and prompts. It does not depend on the number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wfm_ds.data.batch_reader import BatchReader, Candidate, candidate_offsets
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import Sample
from wfm_ds.errors import DataError
from wfm_ds.seeds import derive_seed
from wfm_ds.types import Prompt

T = TypeVar("T")


def sample_index(position: int, num_samples: int, seed: int, shuffle: bool) -> int:
    """Return the dataset index of the sample at a position. Positions count from 0 over all epochs.

    Each epoch contains every sample once.
    """
    epoch, offset = divmod(position, num_samples)
    return int(epoch_order(num_samples, seed, epoch)[offset]) if shuffle else offset


@functools.lru_cache(maxsize=4)  # two adjacent epochs for each of training and validation
def epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    order = permutation(num_samples, derive_seed(seed, "data_order", epoch))
    order.flags.writeable = False
    return order


def permutation(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(count) that depends only on the seed, not on the version of numpy."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable").astype(np.int64)


class PromptOrder:
    """The order of the prompts in RL training. Every epoch contains each prompt once."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("the prompt set is empty")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle

    def step_prompts(self, step: int, count: int) -> list[Prompt]:
        """Return the `count` prompts of RL step `step` (counted from 1). All ranks get the same prompts."""
        return self._select((step - 1) * count, count, self._seed)

    def extra_prompts(self, step: int, count: int, attempt: int) -> list[Prompt]:
        """Return `count` additional prompts to refill RL step `step`.

        attempt: number of the refill round, counted from 1. If prompts are shuffled, each round number has a separate
        order. Otherwise, these are the prompts that follow the step's prompts.
        """
        return self._select((step - 1 + attempt) * count, count, derive_seed(self._seed, "further_prompts", attempt))

    def _select(self, position: int, count: int, seed: int) -> list[Prompt]:
        positions = range(position, position + count)
        return [self._prompts[sample_index(p, len(self._prompts), seed, self._shuffle)] for p in positions]


@dataclass(frozen=True, slots=True)
class BucketPosition:
    """Position of a sample in its bucket: an epoch, and an index into the bucket's sample order in this epoch."""

    bucket: int
    epoch: int
    offset: int


class BucketOrder:
    """Endless sample order for several buckets, in units of `unit` consecutive samples from one bucket.

    Samples enter their buckets in the order of `sample_index`. As soon as a bucket contains `unit` samples, they form
    the next unit. Samples left over at the end of an epoch stay in their bucket.
    """

    def __init__(self, buckets: Sequence[int], *, unit: int, seed: int, shuffle: bool) -> None:
        self.buckets = np.asarray(buckets, dtype=np.int64)
        self.counts = [int(count) for count in np.bincount(self.buckets)]  # samples by bucket
        self.unit, self.seed, self.shuffle = unit, seed, shuffle
        self._cached_split = cache_epochs(self._split_epoch, maxsize=4)
        self._cached_units = cache_epochs(self._epoch_units, maxsize=2)

    def locate(self, position: int) -> BucketPosition:
        unit, offset = divmod(position, self.unit)
        epoch = unit * self.unit // len(self.buckets)  # earliest epoch in which the unit can be filled
        while self._count_units(epoch + 1) <= unit:
            epoch += 1
        buckets, numbers = self._cached_units(epoch)
        index = unit - self._count_units(epoch)
        bucket, number = int(buckets[index]), int(numbers[index])
        return BucketPosition(bucket, *divmod(number * self.unit + offset, self.counts[bucket]))

    def sample_index(self, position: BucketPosition) -> int:
        order, offsets = self._cached_split(position.epoch)
        return int(order[offsets[position.bucket][position.offset]])

    def _count_units(self, epoch: int) -> int:
        return sum(epoch * count // self.unit for count in self.counts)

    def _split_epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """Return the sample order of an epoch, and for each bucket the ascending positions of its samples."""
        num_samples = len(self.buckets)
        order = epoch_order(num_samples, self.seed, epoch) if self.shuffle else np.arange(num_samples)
        by_bucket = np.argsort(self.buckets[order], kind="stable")
        return order, np.split(by_bucket, np.cumsum(self.counts)[:-1])

    def _epoch_units(self, epoch: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the bucket index and the index in the bucket of each unit that becomes complete in this epoch.

        The units are ordered by the positions of their last samples.
        """
        _, offsets = self._cached_split(epoch)
        numbers = [np.arange(epoch * n // self.unit, (epoch + 1) * n // self.unit) for n in self.counts]
        ends = [
            offsets[bucket][(numbers[bucket] + 1) * self.unit - 1 - epoch * count]
            for bucket, count in enumerate(self.counts)
        ]
        order = np.argsort(np.concatenate(ends), kind="stable")
        buckets = np.repeat(np.arange(len(numbers), dtype=np.int32), [len(unit_numbers) for unit_numbers in numbers])
        return buckets[order], np.concatenate(numbers)[order]


def cache_epochs(function: Callable[[int], T], maxsize: int) -> Callable[[int], T]:
    """Cache the `maxsize` most recent results of a function of the epoch. Threads compute each result only once."""
    cached, lock = functools.lru_cache(maxsize=maxsize)(function), threading.Lock()

    def lookup(epoch: int) -> T:
        with lock:
            return cached(epoch)

    return lookup


@dataclass(kw_only=True, eq=False, repr=False)
class BatchSource(BatchReader):
    """Reads batches of a scanned dataset, in the order of BucketOrder.

    A bad file is replaced by a sample from the same bucket. The substitute depends only on the position.
    """

    samples: Sequence[Sample] = field(kw_only=False)
    shuffle: bool
    framings: Sequence[Framing]
    buckets: Sequence[int] | None = None  # index in `framings` for each sample; None: the first framing for all
    unit: int = 1  # see BucketOrder

    def __post_init__(self) -> None:
        if self.global_batch % self.unit:
            raise ValueError(f"a global batch of {self.global_batch} samples cannot be split into units of {self.unit}")
        if not self.samples:
            raise DataError("no training samples: all are held out, or the dataset is empty")
        self.num_samples = len(self.samples)
        super().__post_init__()
        buckets = [0] * len(self.samples) if self.buckets is None else self.buckets
        self.order = BucketOrder(buckets, unit=self.unit, seed=self.seed, shuffle=self.shuffle)

    def _list_candidates(self, position: int) -> Iterator[Candidate]:
        scheduled = self.order.locate(position)
        for offset in candidate_offsets(scheduled.offset, self.order.counts[scheduled.bucket]):
            index = self.order.sample_index(dataclasses.replace(scheduled, offset=offset))
            yield self.samples[index], self.framings[scheduled.bucket], scheduled.epoch
