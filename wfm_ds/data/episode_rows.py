"""States and actions of recorded episodes, read from the parquet files of a LeRobot dataset."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.data.trajectories import Floats
from wfm_ds.storage.filesystem import LFS_ADVICE, LFS_SIGN, open_stream

EPISODE = "episode_index"
NUM_CACHED_FILES = 64  # parquet footers; a file has many episodes
NUM_CACHED_COLUMNS = 8  # per thread: columns of a row group, which may have all rows of a file


@dataclass(frozen=True, slots=True)
class EpisodeRows(Mapping[str, Floats]):
    """The features of one episode: {feature: float32 [length, numbers per frame]}. Features are read on access.

    Access raises KeyError if the feature is unknown, and OSError or ValueError if the file is unreadable.
    """

    file: str  # path or s3:// address of a parquet file
    start: int  # row of the episode's first frame in the file
    length: int  # frames of the episode
    episode: int  # index in the dataset

    def __getitem__(self, feature: str) -> Floats:
        index, stop = read_row_index(self.file), self.start + self.length
        if feature not in index.names:
            raise KeyError(f"no feature {feature} in {self.file}")
        if stop > index.starts[-1]:
            raise ValueError(f"{self.file} has {index.starts[-1]} rows, episode {self.episode} ends at row {stop}")
        first, last = np.searchsorted(index.starts, [self.start, stop - 1], side="right") - 1
        parts = [COLUMNS.read(self.file, group, feature) for group in range(first, last + 1)]
        offset = self.start - int(index.starts[first])
        rows, episodes = (np.concatenate(arrays)[offset : offset + self.length] for arrays in zip(*parts, strict=True))
        if (episodes != self.episode).any():
            raise ValueError(f"{self.file}: rows {self.start} to {stop} do not belong to episode {self.episode}")
        return rows

    def __iter__(self) -> Iterator[str]:
        return iter(read_row_index(self.file).names)

    def __len__(self) -> int:
        return len(read_row_index(self.file).names)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The columns and row groups of a parquet file."""

    names: tuple[str, ...]
    starts: npt.NDArray[np.int64]  # first row of each row group, then the number of rows in the file
    metadata: Any  # of pyarrow


@functools.lru_cache(maxsize=NUM_CACHED_FILES)
def read_row_index(file: str) -> RowIndex:
    import pyarrow.parquet as pq

    with open_stream(file) as stream:
        if stream.read(len(LFS_SIGN)) == LFS_SIGN:
            raise ValueError(f"{file} is {LFS_ADVICE}")
        metadata = pq.read_metadata(stream)
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return RowIndex(tuple(metadata.schema.to_arrow_schema().names), np.cumsum([0, *counts]), metadata)


def read_column(file: str, group: int, feature: str) -> tuple[Floats, Floats]:
    """Read a feature of one row group. Return (values [rows, numbers per row], episode index of each row [rows]).

    Raises OSError and ValueError.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with open_stream(file) as stream:
        parquet = pq.ParquetFile(stream, metadata=read_row_index(file).metadata)
        table = parquet.read_row_group(group, columns=[feature, EPISODE], use_threads=False)
    column, arrays = table[feature].combine_chunks(), []
    while pa.types.is_nested(column.type):  # lists, or lists of lists
        if len(pc.list_value_length(column).unique()) > 1:
            raise ValueError(f"{file}: {feature} has rows of different lengths")
        column = column.flatten()
    for values, shape in ((column, (len(table), -1)), (table[EPISODE], (len(table),))):
        array = np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(shape)
        array.setflags(write=False)  # shared by the windows of an episode
        arrays.append(array)
    return arrays[0], arrays[1]


class ColumnCache(threading.local):
    """A cache of recently read columns, separate for each thread."""

    def __init__(self) -> None:
        self.read = functools.lru_cache(maxsize=NUM_CACHED_COLUMNS)(read_column)


COLUMNS = ColumnCache()
