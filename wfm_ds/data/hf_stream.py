"""Streaming of a Hugging Face dataset (`data.streaming`) in stored order, without a local copy."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from wfm_ds.data.batch_reader import WINDOW, BatchReader, Candidate, TrainingSample, candidate_offsets
from wfm_ds.data.caption_table import find_caption_column
from wfm_ds.data.folder_layout import DOCS_HINT
from wfm_ds.data.hf_dataset import (
    DEFAULT_SUFFIX,
    disable_decoding,
    find_columns,
    is_json_type,
    is_saved_dataset,
    load_split,
    media_suffix,
    parse_row,
)
from wfm_ds.data.media_inputs import MediaInputs
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import REASONS, LocalFile, Media, Sample, to_printable
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe

COMMIT = re.compile(r"[0-9a-f]{40}")
# Errors of `datasets` for unreadable rows. Errors of pyarrow are ValueErrors or OSErrors.
READ_ERRORS = (OSError, ValueError, TypeError, RuntimeError, LookupError, EOFError)


@dataclass(frozen=True, slots=True)
class InMemoryMedia:
    name: str
    column: str  # as for HfMedia, images in two columns of a row are different files, even if they are equal
    suffix: str
    content: bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)

    def identity(self) -> tuple[str | int, ...]:
        return self.name, hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class StreamedRow:
    """A usable row, and the number of epochs that are complete before this row."""

    sample: Sample
    epoch: int


class HfStream:
    """An endless stream of the usable rows of one split, in stored order. Sample ids are the same as in HfDataset."""

    def __init__(self, data: DataRecipe) -> None:
        """Open data.path without reading a row. Raises DataError, for example if the row order is not reproducible."""
        assert isinstance(data.path, str)
        self.source, self._split, self._max_bad_fraction = to_printable(data.path), data.split, data.max_bad_fraction
        self._version = stream_version(data.path, data.options)
        dataset = load_split(data.path, data.split, {**data.options, "streaming": True})
        if dataset.features is None:
            raise DataError(
                f"{self.source}: cannot be streamed, its files declare no columns: remove data.streaming {DOCS_HINT}"
            )
        self._inputs = MediaInputs.from_recipe(data)
        self._media_column, kind, self._input_columns = find_columns(
            dataset.features, self.source, data.image_column, self._inputs
        )
        self._suffix = DEFAULT_SUFFIX[kind]
        self._text_column = find_caption_column(self.source, list(dataset.features), data.caption_column)
        media_columns = list(dict.fromkeys([self._media_column, *self._input_columns.values()]))
        used = (*media_columns, self._text_column)
        plain = {name: getattr(feature, "pa_type", None) for name, feature in dataset.features.items()}
        self._others = [name for name, kind in plain.items() if name not in used and kind and is_json_type(kind)]
        for column in media_columns:
            dataset = disable_decoding(dataset, column)
        self._dataset, self._columns = dataset, [*used, *self._others]
        self._epoch = self._row = self._num_read = 0  # number of rows read in this epoch (_row) and in total
        self._rejected = Counter[str]()
        self._open_rows(None)

    def read(self, count: int) -> list[StreamedRow]:
        """Return the next `count` usable rows. Raises DataError if rows cannot be read or too many are bad."""
        rows: list[StreamedRow] = []
        while len(rows) < count:
            row = self._next_row()
            if row is None:
                self._restart()
                continue
            sample_id = f"{self._split}/{self._row:09}"
            metadata = {name: row[name] for name in self._others}
            media = self._row_media(sample_id, row, self._media_column, self._suffix)
            images = {
                name: self._row_media(sample_id, row, column, DEFAULT_SUFFIX["Image"])
                for name, column in self._input_columns.items()
            }
            sample = parse_row(sample_id, media, row[self._text_column], metadata, images, self._inputs)
            self._row, self._num_read = self._row + 1, self._num_read + 1
            if isinstance(sample, Sample):
                rows.append(StreamedRow(sample, self._epoch))
            else:
                self._count_rejected(sample, sample_id)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next row, and the numbers of rows read and rejected so far, as JSON values."""
        return {
            "version": self._version,
            "epoch": self._epoch,
            "row": self._row,
            "met": self._num_read,
            "rejected": dict(self._rejected),
            "state": self._rows.state_dict() if self._row else None,  # of `datasets`; None: first row
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises DataError if the dataset has changed since it was saved."""
        if state["version"] != self._version:
            raise DataError(
                f"{self.source} has changed since the checkpoint ({state['version']}, now {self._version}): restore "
                "the files or start a new run"
            )
        self._epoch, self._row, self._num_read = state["epoch"], state["row"], state["met"]
        self._rejected = Counter(state["rejected"])
        self._open_rows(state["state"])

    def _open_rows(self, state: Mapping[str, Any] | None) -> None:
        self._rows = self._dataset.select_columns(self._columns)  # at the first row
        if state is not None:
            self._rows.load_state_dict(state)
        self._iterator: Iterator[Mapping[str, Any]] = iter(self._rows)

    def _next_row(self) -> Mapping[str, Any] | None:
        try:
            return next(self._iterator, None)
        except READ_ERRORS as error:
            reason = " ".join(str(error).split())[:300]
            where = f"row {self._row} of split {self._split}"
            raise DataError(f"{self.source}: {where} cannot be read ({type(error).__name__}: {reason})") from error

    def _restart(self) -> None:
        if self._num_read == sum(self._rejected.values()):
            raise DataError(f"{self.source}: all {self._num_read} rows of split {self._split} are invalid {DOCS_HINT}")
        self._epoch, self._row = self._epoch + 1, 0
        self._open_rows(None)

    def _row_media(self, sample_id: str, row: Mapping[str, Any], column: str, suffix: str) -> Media | None:
        cell = row[column]
        if cell is None:
            return None
        name, content = cell["path"], cell["bytes"]
        if content is not None:
            return InMemoryMedia(f"{self.source}#{sample_id}", column, media_suffix(name, suffix), content)
        if name is not None and "://" in name:
            raise DataError(
                f"{self.source}: cannot be streamed, rows refer to files ({to_printable(name)}) instead of containing "
                f"their bytes. Use parquet shards or remove data.streaming {DOCS_HINT}"
            )
        return LocalFile(name) if name is not None and os.path.isfile(name) else None

    def _count_rejected(self, reason: str, sample_id: str) -> None:
        self._rejected[reason] += 1
        num_bad, allowed = sum(self._rejected.values()), self._max_bad_fraction
        if num_bad > allowed * max(self._num_read, WINDOW):
            raise DataError(
                f"{self.source}: {num_bad} of the first {self._num_read} rows are invalid (data.max_bad_fraction: "
                f"{allowed:g}). Last: {sample_id} ({REASONS[reason]})"
            )


def stream_version(path: str, options: Mapping[str, Any]) -> str:
    """Return the dataset's commit on the Hub, or a hash of a folder's file names and sizes. Raises DataError."""
    if os.path.isdir(path):
        if is_saved_dataset(path) or os.path.isfile(os.path.join(path, "dataset_dict.json")):
            raise DataError(f"{path} was written by save_to_disk and needs no streaming: remove data.streaming")
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        listing = "".join(f"{file.relative_to(path)} {file.stat().st_size}\n" for file in files)
        return f"{len(files)} files, {hashlib.sha256(os.fsencode(listing)).hexdigest()[:16]}"
    revision = str(options.get("revision", ""))
    if not COMMIT.fullmatch(revision):
        raise DataError(
            f"{path}: streaming needs a fixed revision, so that a resumed run reads the same data. Set data.options to "
            f"{{revision: COMMIT}}, a 40-digit hash from https://huggingface.co/datasets/{path}/commits/main"
        )
    return revision


@dataclass(kw_only=True, eq=False, repr=False)
class StreamSource(BatchReader):
    """Reads training batches from an HfStream. The batches do not depend on the number of ranks.

    Every replica reads all rows of a batch, but decodes only the images or videos of its own part. If one of them
    cannot be decoded, another row of the same batch replaces it.
    """

    open_stream: Callable[[], HfStream] = field(kw_only=False)  # opens the stream at its first row
    framing: Framing

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stream: HfStream | None = None  # opened by replica leaders when they read their first batch
        self._stream_state: dict[str, Any] | None = None  # state after the last batch; None: first row
        self._rank = 0
        # By step: its rows, and the state of the stream after these rows.
        self._steps: dict[int, Future[tuple[list[StreamedRow], dict[str, Any]]]] = {}
        self._stream_pool = ThreadPoolExecutor(1, thread_name_prefix="stream")  # one thread keeps the order

    def read_batch(self, step: int, rank: int, world_size: int) -> list[TrainingSample]:
        """Return this rank's shard of the batch of an optimizer step (counted from 1). Steps must be read in order."""
        if self._steps and step not in self._steps:
            raise ValueError(f"a stream is read step by step: the next step is {min(self._steps)}, not {step}")
        for wanted in (step, step + 1):
            if wanted not in self._steps:
                self._steps[wanted] = self._stream_pool.submit(self._read_step)
        samples = super().read_batch(step, rank, world_size)
        self._rank, self._stream_state = rank, self._steps.pop(step).result()[1]
        return samples

    def bad_counts(self, world_sums: Callable[[Mapping[str, float]], dict[str, float]]) -> dict[str, float]:
        # Every replica reads all rows, so only the first one counts them.
        counts = self._stream_state["rejected"] if self._stream_state is not None and self._rank == 0 else {}
        rejected = world_sums({f"data/bad/{reason}": counts.get(reason, 0) for reason in REASONS})
        return super().bad_counts(world_sums) | rejected

    def state(self) -> dict[str, Any]:
        """Return this rank's counts of bad files and the state of the stream, as JSON values."""
        return {**super().state(), "stream": self._stream_state}

    def restore_from_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
        super().restore_from_ranks(states, rank, world_size)
        self._rank, self._stream_state = rank, states[0]["stream"]  # identical in all states

    def close(self) -> None:
        super().close()
        self._stream_pool.shutdown(wait=False, cancel_futures=True)

    def _read_step(self) -> tuple[list[StreamedRow], dict[str, Any]]:
        if self._stream is None:
            self._stream = self.open_stream()
            if self._stream_state is not None:
                self._stream.load_state_dict(self._stream_state)
        return self._stream.read(self.global_batch), self._stream.state_dict()

    def _list_candidates(self, position: int) -> Iterator[Candidate]:
        step, offset = divmod(position, self.global_batch)
        rows, _ = self._steps[step + 1].result()
        for index in candidate_offsets(offset, len(rows)):
            yield rows[index].sample, self.framing, rows[index].epoch
