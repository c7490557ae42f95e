"""Readers of training batches. Threads decode files ahead of time, and bad files are replaced and counted."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BAD_MEDIA_REASONS, BadMedia, Framing, convert_decode_errors
from wfm_ds.data.samples import Media, Sample, pack_prompt, unpack_prompt
from wfm_ds.errors import DataError
from wfm_ds.seeds import draw_uniform
from wfm_ds.types import Prompt, SoundClip

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

logger = logging.getLogger(__name__)

MAX_SUBSTITUTES = 10
WINDOW = 1000  # number of recent files over which the share of bad ones is checked
NUM_SHOWN = 10
READ_TIMEOUT_S = 300.0  # per sample, so that a hanging file system causes an error


def candidate_offsets(offset: int, num_samples: int) -> list[int]:
    """Return the offset of a sample in an epoch, followed by the offsets of at most MAX_SUBSTITUTES substitutes."""
    half_epoch = (num_samples + 1) // 2
    return [offset, *((offset + half_epoch + attempt) % num_samples for attempt in range(MAX_SUBSTITUTES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A sample of a training batch, with decoded pixels or cached latents."""

    sample_id: str  # id of the substitute if the file was bad
    epoch: int
    position: int  # in the endless sequence of samples; unique in a run; seeds noise and noise level
    prompt: Prompt
    media: Media | None  # None, like framing, on ranks that do not read files
    framing: Framing | None  # of the pixels or latents
    # [H,W,3] of an image, [F,H,W,3] of a video; None with cached latents, or if the reader does not read media
    pixels: npt.NDArray[np.uint8] | SoundClip | None = None
    latents: Any = None  # from cached_latents
    rejected: TrainingSample | None = None  # rejected sample of a pair, with the same framing

    @property
    def frames(self) -> npt.NDArray[np.uint8] | None:
        """`pixels` without the sound."""
        return self.pixels.frames if isinstance(self.pixels, SoundClip) else self.pixels


Candidate: TypeAlias = tuple[Sample, Framing, int]
"""A sample that may be read for a position, its framing (crop size and frames), and its epoch."""
LoadResult: TypeAlias = tuple[TrainingSample | None, list[BadMedia]]
"""The sample for a position, or None if no file is good, and the errors of the bad files that were tried."""


@dataclass(kw_only=True, eq=False, repr=False)
class BatchReader(ABC):
    """Base class that reads training batches from an endless sequence of samples, epoch after epoch.

    A position is an index into this sequence. Optimizer step s (from 1) reads `global_batch` consecutive positions,
    starting at (s-1) * global_batch. `bad` maps each reason to the number of bad files that this rank has read.
    """

    global_batch: int  # samples per optimizer step over all ranks
    seed: int
    max_bad_fraction: float
    num_samples: int | None = field(default=None, init=False)  # size of the dataset, None if unknown
    workers: int = 2  # number of decoding threads
    cached_latents: Callable[[Media, Framing], Any] | None = None  # latents of a file, or None if it must be decoded
    rejected: Mapping[str, int] = field(default_factory=dict)  # {reason: number of entries that the scan rejected}
    inputs: InputReader | None = None  # reader of conditioning inputs
    reads_media: bool = True  # False: only prompts and inputs are needed, so samples have no pixels and latents

    def __post_init__(self) -> None:
        self.bad: Counter[str] = Counter()
        self._logged: dict[str, str] = {}
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # True: a bad file
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="media")
        self._ahead: dict[int, Future[LoadResult]] = {}  # by position

    @abstractmethod
    def _list_candidates(self, position: int) -> Iterator[Candidate]:
        """Yield the sample at a position, then its substitutes. Worker threads call this; it must not change state."""

    def read_batch(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """Return this rank's contiguous shard of the batch of an optimizer step (counted from 1).

        Raises DataError if too many files are bad (max_bad_fraction), or if a file and all its substitutes are bad. The
        other ranks do not get this error.
        """
        if self.global_batch % world_size:
            raise ValueError(f"{world_size} ranks cannot share a global batch of {self.global_batch} evenly")
        size = self.global_batch // world_size
        firsts = ((s - 1) * self.global_batch + rank * size for s in (step, step + 1))
        positions, next_positions = (range(first, first + size) for first in firsts)
        return self.read_positions(positions, ahead=next_positions)

    def read_positions(self, positions: Sequence[int], *, ahead: Sequence[int] = ()) -> list[TrainingSample]:
        """Return the samples at `positions`, and start threads that read the samples at the positions `ahead`.

        Raises DataError like `read_batch`.
        """
        futures = self._submit(positions)
        self._ahead = self._submit(ahead)
        return [self._wait_for_sample(position, future) for position, future in futures.items()]

    def bad_counts(self, world_sums: Callable[[Mapping[str, float]], dict[str, float]]) -> dict[str, float]:
        """Return {data/bad/REASON: count} over all ranks, including the entries that the scan of the dataset rejected.

        All ranks must call this. world_sums: function that sums each value over all ranks.
        """
        counts = world_sums({f"data/bad/{reason}": self.bad[reason] for reason in BAD_MEDIA_REASONS})
        return counts | {f"data/bad/{reason}": count for reason, count in self.rejected.items()}

    def state(self) -> dict[str, Any]:
        return {"bad": dict(self.bad), "logged": dict(self._logged), "recent": [int(bad) for bad in self._recent]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bad = Counter(state["bad"])
        self._logged = dict(state["logged"])
        self._recent.extend(bool(bad) for bad in state["recent"])

    def restore_from_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Restore the counts of bad files from the states of all ranks.

        If the number of ranks has changed, rank 0 gets the sums, and the other ranks start at 0.
        """
        if len(states) == world_size:
            self.restore(states[rank])
            return
        logged = {path: message for state in states for path, message in state["logged"].items()}
        counts = sum((Counter(state["bad"]) for state in states), Counter[str]())
        self.restore({"bad": counts if rank == 0 else {}, "logged": logged, "recent": []})

    def close(self) -> None:
        """Stop prefetching without waiting for running reads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, positions: Sequence[int]) -> dict[int, Future[LoadResult]]:
        for position in self._ahead.keys() - set(positions):  # left over after a jump to another step
            self._ahead.pop(position).cancel()
        ahead = self._ahead
        return {p: ahead.pop(p) if p in ahead else self._pool.submit(self._load_first_usable, p) for p in positions}

    def _load_first_usable(self, position: int) -> LoadResult:
        failures: list[BadMedia] = []
        for candidate in self._list_candidates(position):
            try:
                return self._decode(*candidate, position), failures
            except BadMedia as failure:
                failures.append(failure)
        return None, failures

    def _decode(self, sample: Sample, framing: Framing, epoch: int, position: int) -> TrainingSample:
        def draw(purpose: str) -> float:
            return draw_uniform(self.seed, purpose, epoch, sample.id)

        prompt = sample.prompt if self.inputs is None else self.inputs.load_prompt(sample, framing, draw)
        if sample.texts:
            prompt = replace(prompt, text=sample.texts[int(draw("caption") * len(sample.texts))])

        def decode_media(media: Media, rejected: TrainingSample | None = None) -> TrainingSample:
            pixels = latents = None
            if self.reads_media and self.cached_latents is not None:
                with convert_decode_errors(media):
                    latents = self.cached_latents(media, framing)
            if self.reads_media and latents is None:
                pixels = load_media(media, framing, draw)
            return TrainingSample(
                sample_id=sample.id,
                epoch=epoch,
                position=position,
                prompt=prompt,
                media=media,
                framing=framing,
                pixels=pixels,
                latents=latents,
                rejected=rejected,
            )

        return decode_media(sample.media, None if sample.rejected is None else decode_media(sample.rejected))

    def _wait_for_sample(self, position: int, future: Future[LoadResult]) -> TrainingSample:
        try:
            sample, failures = future.result(timeout=READ_TIMEOUT_S)
        except TimeoutError as error:
            raise DataError(f"reading the sample at position {position} exceeded {READ_TIMEOUT_S:g} s") from error
        for failure in failures:
            self._count_failure(failure)
        if sample is None:
            raise DataError(
                f"a file and all its substitutes are invalid ({len(failures)} files): {self._list_failures()}"
            )
        self._recent.append(False)
        return sample

    def _count_failure(self, failure: BadMedia) -> None:
        self.bad[failure.reason] += 1
        if failure.name not in self._logged:
            self._logged[failure.name] = str(failure)
            logger.warning("skipped %s", failure)
        self._recent.append(True)
        if self.num_samples is not None and len(self._logged) > self.max_bad_fraction * self.num_samples:
            raise DataError(
                f"{len(self._logged)} of {self.num_samples} samples are invalid "
                f"(data.max_bad_fraction: {self.max_bad_fraction:g}). First: {self._list_failures()}"
            )
        # Compare with the full WINDOW even before it is full, so that one bad file at the start does not stop the run.
        if sum(self._recent) > self.max_bad_fraction * WINDOW:
            raise DataError(
                f"{sum(self._recent)} of the last {len(self._recent)} files are invalid, more than "
                f"data.max_bad_fraction {self.max_bad_fraction:g} of {WINDOW}. First: {self._list_failures()}"
            )

    def _list_failures(self) -> str:
        return "; ".join(list(self._logged.values())[:NUM_SHOWN])


def read_on_leader(world: World, read: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
    """Call `read` on the leader (first rank) of each replica, and return its samples on all ranks of the replica.

    All ranks must call this. Only the leader's samples have media, pixels or latents. If `read` raises UserError on a
    leader, all ranks raise it.
    """
    samples: list[TrainingSample] | None = world.run_checked(read, on="leaders")
    if samples is not None:
        if world.sp_size > 1:  # packing takes time if prompts have input images or videos
            world.broadcast_in_replica([[s.sample_id, s.epoch, s.position, pack_prompt(s.prompt)] for s in samples])
        return samples
    return [
        TrainingSample(
            sample_id=sample_id, epoch=epoch, position=position, prompt=unpack_prompt(prompt), media=None, framing=None
        )
        for sample_id, epoch, position, prompt in world.broadcast_in_replica(None)
    ]


def choose_on_leader(world: World, samples: Sequence[Sample], choose: Callable[[], list[Sample]]) -> list[Sample]:
    """Call `choose` on the leader (first rank) of each replica, and return its choice on all ranks of the replica.

    All ranks must call this, with the same `samples`. If `choose` raises UserError on a leader, all ranks raise it.
    """
    chosen: list[Sample] | None = world.run_checked(choose, on="leaders")
    if chosen is not None:
        if world.sp_size == 1:
            return chosen
        indices = {sample.id: index for index, sample in enumerate(samples)}  # ids are unique in a dataset
        world.broadcast_in_replica([[indices[sample.id], pack_prompt(sample.prompt)] for sample in chosen])
        return chosen
    return [replace(samples[index], prompt=unpack_prompt(packed)) for index, packed in world.broadcast_in_replica(None)]
