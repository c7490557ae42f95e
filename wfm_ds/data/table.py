"""Captions in a table: metadata.jsonl, .csv or .parquet beside the media that it names."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.data.layout import PAGE
from wfm_ds.data.pairs import names_in
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Sample, SampleSet, is_encodable, printable
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.regular import open_regular
from wfm_ds.types import Prompt

FILE_COLUMNS = ("file_name", "file", "image_path", "video_path", "image")
CAPTION_COLUMNS = ("text", "prompt", "caption")
MAX_COLUMNS_SHOWN = 12
PLAIN = str | int | float | bool | None  # a value that a table of any kind can hold, and JSON too


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    place: str  # for messages: `line 7`
    values: dict[str, Any]


class CaptionTable(SampleSet):
    """Media that a table names, with their captions. An id is the medium's path below the table's folder, without the
    last suffix: that of the same medium with a NAME.txt beside it.

    Columns besides file, caption and `negative_prompt` become metadata. Media without a line are not looked at.
    """

    def __init__(self, table: Path, *, column: str | None = None, max_bad_fraction: float) -> None:
        """`column`: the one with the captions; None: the first of CAPTION_COLUMNS that there is.

        Raises DataError for a table that cannot be read or lacks a column, if there is no usable sample, or if more
        than this share of the lines is bad.
        """
        super().__init__(str(table.parent))
        self.table = table
        rows = table_rows(table)
        if not rows:
            raise DataError(f"{table} has no line: write one with file_name and text for each image or video {PAGE}")
        self._file_column, self._caption_column = columns_of(table, rows, column)
        self._names = functools.cache(names_in)  # a listing of each folder once
        self._seen: set[str] = set()
        self._missing: list[str] = []
        self._outside: list[str] = []
        for row in rows:
            LIVENESS.advance()
            self._add(row)
        if self._outside:
            count = len(self._outside)
            self.notes.append(
                f"{table.name} names {count} files outside of {self.source}, the first {self._outside[0]}"
            )
        self.samples.sort(key=lambda sample: sample.id)
        self.check(max_bad_fraction)

    def check(self, max_bad_fraction: float) -> None:
        try:
            super().check(max_bad_fraction)
        except DataError as error:
            if self._missing:
                raise DataError(f"{self._missing[0]}, which is not in {self.source} {PAGE}") from error
            raise

    def _add(self, row: Row) -> None:
        values = dict(row.values)
        name, text = values.pop(self._file_column, None), values.pop(self._caption_column, None)
        negative = values.pop("negative_prompt", None)
        where = f"{self.table.name} {row.place}"
        if not isinstance(name, str) or not self._is_there(name):
            if isinstance(name, str):
                self._missing.append(f"{where} names {printable(name)}")
            self.reject("no_media", f"{where}: {name}")
        elif not isinstance(text, str) or not text.strip() or not is_encodable([text, negative, values]):
            self.reject("no_prompt", f"{where}: {name}")
        elif (sample_id := self._id(name)) in self._seen:
            self.reject("ambiguous", f"{where}: {name}")
        else:
            self._seen.add(sample_id)
            prompt = Prompt(
                id=sample_id,
                text=text.strip(),
                negative_text=negative if isinstance(negative, str) and negative.strip() else None,
                metadata=values,
            )
            self.samples.append(Sample(id=sample_id, media=LocalFile(self._path(name)), prompt=prompt))

    def _path(self, name: str) -> str:
        return os.path.normpath(self.table.parent / name)

    def _is_there(self, name: str) -> bool:
        if "\0" in name or os.path.splitext(name)[1].lower() not in MEDIA_SUFFIXES:
            return False
        folder, file = os.path.split(self._path(name))
        return file in self._names(folder)

    def _id(self, name: str) -> str:
        """Return the id of a medium; notes one that lies elsewhere."""
        path, top = self._path(name), os.path.normpath(self.table.parent)
        inside = os.path.commonpath([os.path.abspath(path), os.path.abspath(top)]) == os.path.abspath(top)
        if not inside:
            self._outside.append(printable(name))
        relative = os.path.relpath(path, top) if inside else os.path.normpath(name)
        return printable(os.path.splitext(relative)[0])


def columns_of(table: Path, rows: Sequence[Row], column: str | None) -> tuple[str, str]:
    """Return the columns with file and caption. Raises DataError where the table has none."""
    known = list(dict.fromkeys(name for row in rows for name in row.values))
    more = f" and {len(known) - MAX_COLUMNS_SHOWN} more" if len(known) > MAX_COLUMNS_SHOWN else ""
    there = printable(f"{table.name} has the columns {', '.join(known[:MAX_COLUMNS_SHOWN])}{more}")
    file_column = next((name for name in FILE_COLUMNS if name in known), None)
    if file_column is None:
        raise DataError(f"{there}: none is file_name; rename the one with the paths of the media {PAGE}")
    if column is not None and column not in known:
        raise DataError(f"{there}: none is data.caption_column {column} {PAGE}")
    caption_column = column or next((name for name in CAPTION_COLUMNS if name in known), None)
    if caption_column is None:
        raise DataError(f"{there}: none is text, prompt or caption; name it with data.caption_column {PAGE}")
    return file_column, caption_column


def table_rows(table: Path) -> list[Row]:
    """Read the rows of a .jsonl, .csv (both UTF-8) or .parquet file. Raises DataError, with the line."""
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        return parquet_rows(table)
    if suffix not in (".jsonl", ".csv"):
        raise DataError(f"{table} is neither a .csv nor a .jsonl file")
    try:
        with io.TextIOWrapper(open_regular(table), encoding="utf-8-sig", newline="") as file:
            if suffix == ".jsonl":
                lines = enumerate(file, start=1)
                return [Row(f"line {n}", json_row(table, n, line)) for n, line in lines if line.strip()]
            reader = csv.DictReader(file, strict=True)
            return [Row(f"line {reader.line_num}", csv_row(table, reader.line_num, row)) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {error}") from error


def json_row(table: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{table}: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{table}: line {number} is not a JSON object")
    return row


def csv_row(table: Path, number: int, row: Mapping[str | None, Any]) -> dict[str, Any]:
    if None in row or None in row.values():
        raise DataError(f"{table}: line {number} has more or fewer fields than the header")
    return {str(name): value for name, value in row.items()}


def parquet_rows(table: Path) -> list[Row]:
    """Read the rows of a parquet file; values that JSON has no form for are left out."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{table} needs pyarrow: pip install "wfm_ds[datasets]"') from error
    try:
        rows = pyarrow.parquet.read_table(table).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{table} cannot be read: {error}") from error
    return [
        Row(f"row {number}", {name: value for name, value in row.items() if isinstance(value, PLAIN)})
        for number, row in enumerate(rows, start=1)
    ]
