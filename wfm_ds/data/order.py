"""The order of samples, the same at any world size and number of workers, and the batches cut from that order.

The order is pure; what touches files is in data/reading.py.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wfm_ds.data.inputs import InputReader
from wfm_ds.data.pixels import Framing
from wfm_ds.data.reading import Candidate, Reader, places
from wfm_ds.data.samples import Media, Sample
from wfm_ds.errors import DataError
from wfm_ds.seeds import derive_seed

T = TypeVar("T")


def sample_index(position: int, num_samples: int, seed: int, shuffle: bool) -> int:
    """The sample at this position of an endless pass over the data, position 0 being the first of epoch 0.

    Each epoch shows every sample once; shuffled, in an order of its own that depends on (seed, epoch) alone.
    """
    epoch, offset = divmod(position, num_samples)
    return int(epoch_order(num_samples, seed, epoch)[offset]) if shuffle else offset


@functools.lru_cache(maxsize=4)  # an epoch and its neighbour, for training and for validation
def epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of range(num_samples), read-only."""
    order = permuted(num_samples, derive_seed(seed, "data_order", epoch))
    order.flags.writeable = False
    return order


def permuted(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return range(count) in an order that follows from the seed.

    Sorting raw 64-bit draws: numpy guarantees the raw stream of a bit generator, but not what `permutation` does with
    it, and a resumed run must see the same order after an upgrade.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a sample in the order that its bucket has in an epoch."""

    bucket: int
    epoch: int
    offset: int


class BucketOrder:
    """The endless pass over samples of several buckets, cut into units of positions that have one bucket each.

    The samples are dealt to their buckets in the order of `sample_index`, epoch after epoch. When `unit` of them are in
    a bucket they leave it and are the next unit; what an epoch leaves in the buckets waits there for the next one. So
    every sample is shown equally often, and with one bucket this is that order itself. No position needs the ones
    before it: n samples of a bucket have filled epochs * n // unit units of it, whatever their order.
    """

    def __init__(self, buckets: Sequence[int], *, unit: int, seed: int, shuffle: bool) -> None:
        """`buckets`: of each sample, numbers from 0."""
        self.buckets = np.asarray(buckets, dtype=np.int64)
        self.counts = [int(count) for count in np.bincount(self.buckets)]  # samples by bucket
        self.unit, self.seed, self.shuffle = unit, seed, shuffle
        self._epoch = computed_once(self._dealt, maxsize=4)
        self._units = computed_once(self._filled, maxsize=2)

    def place(self, position: int) -> Place:
        """Return the place of the sample at this position, from 0."""
        unit, within = divmod(position, self.unit)
        epoch = unit * self.unit // len(self.buckets)  # in which at the earliest it is filled
        while self._units_before(epoch + 1) <= unit:
            epoch += 1
        buckets, numbers = self._units(epoch)
        index = unit - self._units_before(epoch)
        bucket, number = int(buckets[index]), int(numbers[index])
        return Place(bucket, *divmod(number * self.unit + within, self.counts[bucket]))

    def sample(self, place: Place) -> int:
        """The index of the sample that stands there."""
        order, offsets = self._epoch(place.epoch)
        return int(order[offsets[place.bucket][place.offset]])

    def _units_before(self, epoch: int) -> int:
        return sum(epoch * count // self.unit for count in self.counts)

    def _dealt(self, epoch: int) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
        """The order of an epoch, and where in it the samples of each bucket are, ascending."""
        num_samples = len(self.buckets)
        order = epoch_order(num_samples, self.seed, epoch) if self.shuffle else np.arange(num_samples)
        by_bucket = np.argsort(self.buckets[order], kind="stable")
        return order, np.split(by_bucket, np.cumsum(self.counts)[:-1])

    def _filled(self, epoch: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The buckets, and the numbers among their units, of the units that are filled in this epoch, in the order of
        the last sample of each."""
        _, offsets = self._epoch(epoch)
        numbers = [np.arange(epoch * n // self.unit, (epoch + 1) * n // self.unit) for n in self.counts]
        ends = [
            offsets[bucket][(numbers[bucket] + 1) * self.unit - 1 - epoch * count]
            for bucket, count in enumerate(self.counts)
        ]
        order = np.argsort(np.concatenate(ends), kind="stable")
        buckets = np.repeat(np.arange(len(numbers), dtype=np.int32), [len(of_bucket) for of_bucket in numbers])
        return buckets[order], np.concatenate(numbers)[order]


def computed_once(function: Callable[[int], T], maxsize: int) -> Callable[[int], T]:
    """`function` of the last few epochs, kept; threads that want the same one wait for the first of them."""
    cached, lock = functools.lru_cache(maxsize=maxsize)(function), threading.Lock()

    def of(epoch: int) -> T:
        with lock:
            return cached(epoch)

    return of


class BatchSource(Reader):
    """Batches of samples that are all known, in the order of BucketOrder.

    What a position shows depends on the position alone: a file that cannot be decoded is replaced by a substitute
    derived from its place in the epoch and of the same bucket, so all ranks keep doing the same number of forwards.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        global_batch: int,
        seed: int,
        shuffle: bool,
        framings: Sequence[Framing],
        max_bad_fraction: float,
        buckets: Sequence[int] | None = None,
        unit: int = 1,
        workers: int = 2,
        cached: Callable[[Media, Framing], Any] | None = None,
        rejected: Mapping[str, int] = MappingProxyType({}),
        inputs: InputReader | None = None,
    ) -> None:
        """`global_batch`: samples of one optimizer step over all ranks; `buckets`: of each sample, its index among
        `framings`, None if that is 0; `unit`: neighbouring positions that have one bucket; `workers`: threads that
        decode; `cached`: the latents of a medium if there are some, else None; with them it is not decoded;
        `rejected`: entries of the data set by reason that are no samples; `inputs`: reads what samples are told.
        """
        if global_batch % unit:
            raise ValueError(f"a global batch of {global_batch} samples cannot be cut into units of {unit}")
        if not samples:
            raise DataError("there is no training sample: every one of them is held out, or the data set is empty")
        super().__init__(
            global_batch=global_batch,
            seed=seed,
            max_bad_fraction=max_bad_fraction,
            num_samples=len(samples),
            workers=workers,
            cached=cached,
            rejected=rejected,
            inputs=inputs,
        )
        self.samples = samples
        buckets = [0] * len(samples) if buckets is None else buckets
        self.order = BucketOrder(buckets, unit=unit, seed=seed, shuffle=shuffle)
        self.framings = framings

    def _candidates(self, position: int) -> Iterator[Candidate]:
        due = self.order.place(position)
        for offset in places(due.offset, self.order.counts[due.bucket]):
            place = dataclasses.replace(due, offset=offset)
            yield Candidate(self.samples[self.order.sample(place)], self.framings[place.bucket], place.epoch)
