"""The order of samples, the same at any world size and number of workers, and the batches cut from that order.

The order is pure; BatchSource decodes media ahead in threads and is the only part that touches files.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BAD_MEDIA, BadMedia, Draw, Framing, decoding
from wfm_ds.data.samples import Media, Sample
from wfm_ds.errors import DataError
from wfm_ds.seeds import derive_seed, uniform
from wfm_ds.types import Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SUBSTITUTES = 10
WINDOW = 1000  # tried files over which the share of bad ones is judged
NUM_SHOWN = 10
READ_TIMEOUT_S = 300.0  # for one sample; a file system that hangs becomes an error instead of a silent stop


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


def places(offset: int, num_samples: int) -> list[int]:
    """Return the offsets to try for a usable sample: the offset, then its substitutes, half an epoch away."""
    half = (num_samples + 1) // 2
    return [offset, *((offset + half + attempt) % num_samples for attempt in range(MAX_SUBSTITUTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One decoded sample of a batch."""

    sample_id: str  # of the substitute, where one stands in for a bad file
    epoch: int
    position: int  # over all epochs; unique in a run, so noise and noise level are keyed by it
    prompt: Prompt
    media: Media | None  # None on a rank that does not read, as the framing
    framing: Framing | None  # of its pixels or latents
    pixels: npt.NDArray[np.uint8] | None  # [H,W,3] of an image, [F,H,W,3] of a video; None if there are latents
    latents: Any = None  # as the source's `cached` has them
    rejected: TrainingSample | None = None  # of a pair: the same with the other medium, framed alike


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of reading one position: the sample, unless all substitutes were bad, and the bad files met on the way."""

    sample: TrainingSample | None
    failures: tuple[BadMedia, ...]


class BatchSource:
    """SFT batches: optimizer step s trains positions (s-1) * global_batch up to s * global_batch, cut by rank. Ranks
    are data-parallel ones.

    What a position shows depends on the position alone: a file that cannot be decoded is replaced by a substitute
    derived from its place in the epoch and of the same bucket, so all ranks keep doing the same number of forwards.
    `bad` counts the bad files met by this rank by reason, repeated meetings included.
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
    ) -> None:
        """`global_batch`: samples of one optimizer step over all ranks; `buckets`: of each sample, its index among
        `framings`, None if that is 0; `unit`: neighbouring positions that have one bucket; `workers`: threads that
        decode; `cached`: the latents of a medium if there are some, else None; with them it is not decoded;
        `rejected`: entries of the data set by reason that are no samples.
        """
        if global_batch % unit:
            raise ValueError(f"a global batch of {global_batch} samples cannot be cut into units of {unit}")
        if not samples:
            raise DataError("there is no training sample: every one of them is held out, or the data set is empty")
        self.samples = samples
        self.global_batch = global_batch
        self.seed = seed
        buckets = [0] * len(samples) if buckets is None else buckets
        self.order = BucketOrder(buckets, unit=unit, seed=seed, shuffle=shuffle)
        self.framings = framings
        self.max_bad_fraction = max_bad_fraction
        self.cached = cached
        self.rejected = rejected
        self.bad: Counter[str] = Counter()
        self._logged: dict[str, str] = {}
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # True: this try met a bad file
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="media")
        self._ahead: dict[int, Future[Loaded]] = {}  # by position

    def batch(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """This rank's contiguous share of the global batch of optimizer step `step` (from 1), in order.

        Raises DataError when more than max_bad_fraction of the last WINDOW tried files were bad, or when a file and
        all its substitutes are. That is a local fact: the caller has to agree on it with the other ranks.
        """
        here, after = (self._positions(s, rank, world_size) for s in (step, step + 1))
        return self.at(here, ahead=after)

    def at(self, positions: Sequence[int], *, ahead: Sequence[int] = ()) -> list[TrainingSample]:
        """The samples at these positions of the endless pass over the data, in order; those at `ahead`, which a next
        call is going to ask for, are read meanwhile. Raises DataError as `batch` does."""
        futures = self._reading(positions)
        self._ahead = self._reading(ahead)
        return [self._take(position, future) for position, future in futures.items()]

    def bad_counts(self, world_sums: Callable[[Mapping[str, float]], dict[str, float]]) -> dict[str, float]:
        """`data/bad/REASON`: what the scan rejected, and what the ranks met since. Collective, as `world_sums` is."""
        met = world_sums({f"data/bad/{reason}": self.bad[reason] for reason in BAD_MEDIA})
        return met | {f"data/bad/{reason}": count for reason, count in self.rejected.items()}

    def state(self) -> dict[str, Any]:
        """Return what this rank knows of bad files, as JSON. The next samples follow from the step alone."""
        return {
            "bad": dict(self.bad),
            "logged": dict(self._logged),
            "recent": [int(bad) for bad in self._recent],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bad = Counter(state["bad"])
        self._logged = dict(state["logged"])
        self._recent.extend(bool(bad) for bad in state["recent"])

    def restore_from_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Take up what the ranks of a run knew, however many they were: nothing is logged or counted twice."""
        if len(states) == world_size:
            self.restore(states[rank])
            return
        logged = {path: message for state in states for path, message in state["logged"].items()}
        counts = sum((Counter(state["bad"]) for state in states), Counter[str]())
        self.restore({"bad": counts if rank == 0 else {}, "logged": logged, "recent": []})

    def close(self) -> None:
        """Stop reading ahead; a read that hangs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _positions(self, step: int, rank: int, world_size: int) -> range:
        if self.global_batch % world_size:
            raise ValueError(f"{world_size} ranks cannot share a global batch of {self.global_batch} evenly")
        size = self.global_batch // world_size
        first = (step - 1) * self.global_batch + rank * size
        return range(first, first + size)

    def _reading(self, positions: Sequence[int]) -> dict[int, Future[Loaded]]:
        for position in self._ahead.keys() - set(positions):  # after a jump to another step
            self._ahead.pop(position).cancel()
        ahead = self._ahead
        return {p: ahead.pop(p) if p in ahead else self._pool.submit(self._load, p) for p in positions}

    def _load(self, position: int) -> Loaded:
        """Runs in the pool: reads files, changes nothing."""
        due = self.order.place(position)
        failures: list[BadMedia] = []
        for offset in places(due.offset, self.order.counts[due.bucket]):
            place = dataclasses.replace(due, offset=offset)
            try:
                return Loaded(self._decode(place, position), tuple(failures))
            except BadMedia as failure:
                failures.append(failure)
        return Loaded(None, tuple(failures))

    def _decode(self, place: Place, position: int) -> TrainingSample:
        sample, framing = self.samples[self.order.sample(place)], self.framings[place.bucket]

        def decoded(media: Media, rejected: TrainingSample | None = None) -> TrainingSample:
            pixels = None
            with decoding(media):
                latents = None if self.cached is None else self.cached(media, framing)
            if latents is None:
                pixels = load_media(media, framing, self._draw(place.epoch, sample.id))
            return TrainingSample(
                sample_id=sample.id,
                epoch=place.epoch,
                position=position,
                prompt=sample.prompt,
                media=media,
                framing=framing,
                pixels=pixels,
                latents=latents,
                rejected=rejected,
            )

        return decoded(sample.media, None if sample.rejected is None else decoded(sample.rejected))

    def _draw(self, epoch: int, sample_id: str) -> Draw:
        return lambda purpose: uniform(self.seed, purpose, epoch, sample_id)

    def _take(self, position: int, future: Future[Loaded]) -> TrainingSample:
        try:
            loaded = future.result(timeout=READ_TIMEOUT_S)
        except TimeoutError as error:
            raise DataError(f"the sample at position {position} was not read within {READ_TIMEOUT_S:g} s") from error
        for failure in loaded.failures:
            self._count(failure)
        if loaded.sample is None:
            raise DataError(f"{len(loaded.failures)} files in a row cannot be used: {self._shown()}")
        self._recent.append(False)
        return loaded.sample

    def _count(self, failure: BadMedia) -> None:
        self.bad[failure.reason] += 1
        if failure.name not in self._logged:
            self._logged[failure.name] = str(failure)
            logger.warning("skipped %s", failure)
        self._recent.append(True)
        if len(self._logged) > self.max_bad_fraction * len(self.samples):
            raise DataError(
                f"{len(self._logged)} of {len(self.samples)} media cannot be used, more than "
                f"data.max_bad_fraction {self.max_bad_fraction:g}; repair the first: {self._shown()}"
            )
        # Of WINDOW tries, also while there were fewer: the first bad file alone is no reason to stop.
        if sum(self._recent) > self.max_bad_fraction * WINDOW:
            raise DataError(
                f"{sum(self._recent)} of the last {len(self._recent)} files cannot be used, more than "
                f"data.max_bad_fraction {self.max_bad_fraction:g} of {WINDOW}; repair the first: {self._shown()}"
            )

    def _shown(self) -> str:
        return "; ".join(list(self._logged.values())[:NUM_SHOWN])
