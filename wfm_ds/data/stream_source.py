"""Batches of a streamed dataset.

Every replica reads all rows of the stream, but decodes only its shard of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wfm_ds.data.batch_reader import BatchReader, SampleCandidate, TrainingSample, candidate_offsets
from wfm_ds.data.hf_stream import HfStream, StreamedRow
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import REASONS


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The rows of one optimizer step, and the state of the stream after these rows."""

    rows: Sequence[StreamedRow]
    state: dict[str, Any]


class StreamSource(BatchReader):
    """Batches of an endless stream. They are the same for any number of ranks.

    Position p is the usable row p of the stream. A file that cannot be decoded is replaced by another row of the same
    step. Memory holds the rows of two steps. Their files are decoded when a batch needs them.
    """

    def __init__(
        self,
        open_stream: Callable[[], HfStream],
        *,
        global_batch: int,
        seed: int,
        framing: Framing,
        max_bad_fraction: float,
        workers: int = 2,
        inputs: InputReader | None = None,
    ) -> None:
        """open_stream: function that opens the stream at its first row.

        Only replica leaders call it, when they read their first batch.
        """
        super().__init__(
            global_batch=global_batch, seed=seed, max_bad_fraction=max_bad_fraction, workers=workers, inputs=inputs
        )
        self._open_stream, self._framing = open_stream, framing
        self._stream: HfStream | None = None
        self._stream_state: dict[str, Any] | None = None  # state after the last batch; None: first row
        self._rank = 0
        self._steps: dict[int, Future[StreamStep]] = {}  # by step
        self._stream_pool = ThreadPoolExecutor(1, thread_name_prefix="stream")  # one thread keeps the order

    def read_batch(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """Return this rank's shard of a step's batch, like `BatchReader.read_batch`. Steps must be read in order."""
        if self._steps and step not in self._steps:
            raise ValueError(f"a stream is read step by step: the next step is {min(self._steps)}, not {step}")
        for wanted in (step, step + 1):
            if wanted not in self._steps:
                self._steps[wanted] = self._stream_pool.submit(self._read_step)
        samples = super().read_batch(step, rank, world_size)
        self._rank, self._stream_state = rank, self._steps.pop(step).result().state
        return samples

    def bad_counts(self, world_sums: Callable[[Mapping[str, float]], dict[str, float]]) -> dict[str, float]:
        # Every replica reads all rows, so only the first one counts them.
        counts = self._stream_state["rejected"] if self._stream_state is not None and self._rank == 0 else {}
        rejected = world_sums({f"data/bad/{reason}": counts.get(reason, 0) for reason in REASONS})
        return super().bad_counts(world_sums) | rejected

    def state(self) -> dict[str, Any]:
        """Return this rank's record of bad files and the state of the stream, as JSON."""
        return {**super().state(), "stream": self._stream_state}

    def restore_from_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        super().restore_from_ranks(states, rank, world_size)
        self._rank, self._stream_state = rank, states[0]["stream"]  # identical in all states

    def close(self) -> None:
        super().close()
        self._stream_pool.shutdown(wait=False, cancel_futures=True)

    def _read_step(self) -> StreamStep:
        if self._stream is None:
            self._stream = self._open_stream()
            if self._stream_state is not None:
                self._stream.load_state_dict(self._stream_state)
        rows = self._stream.read(self.global_batch)
        return StreamStep(rows, self._stream.state_dict())

    def _list_candidates(self, position: int) -> Iterator[SampleCandidate]:
        step, offset = divmod(position, self.global_batch)
        rows = self._steps[step + 1].result().rows
        for index in candidate_offsets(offset, len(rows)):
            yield SampleCandidate(rows[index].sample, self._framing, rows[index].epoch)
