"""Caption tables: metadata.jsonl, .csv or .parquet in the folder of the images and videos."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from wfm_ds.data.folder_layout import DOCS_HINT
from wfm_ds.data.preference_pairs import list_folder
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Sample, SampleSet, is_encodable, to_printable
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import open_regular, read_regular
from wfm_ds.storage.json_lines import split_lines
from wfm_ds.types import Prompt

FILE_COLUMNS = ("file_name", "file", "image_path", "video_path", "image")
CAPTION_COLUMNS = ("text", "prompt", "caption")
MAX_COLUMNS_SHOWN = 12
JSON_SCALAR = str | int | float | bool | None  # values that JSON can represent
TableRows: TypeAlias = dict[str, dict[str, Any]]
"""{location, such as `line 7`: {column: value}}."""


class CaptionTable(SampleSet):
    """Captioned images and videos listed in a table. Ids are relative paths without suffix.

    Columns other than the file, the caption and `negative_prompt` become metadata. Files without a row are ignored.
    """

    def __init__(self, table: Path, *, column: str | None = None, max_bad_fraction: float) -> None:
        """column: name of the caption column. None selects the first of CAPTION_COLUMNS that exists.

        Raises DataError if the table cannot be read, a column is missing, there is no usable sample, or more than
        max_bad_fraction of the rows are bad.
        """
        super().__init__(str(table.parent))
        self.table = table
        rows = read_rows(table)
        if not rows:
            raise DataError(
                f"{table} is empty: write a line with file_name and text for each image or video {DOCS_HINT}"
            )
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        self._file_column = next((name for name in FILE_COLUMNS if name in columns), "")
        if not self._file_column:
            prefix = describe_columns(table.name, columns)
            raise DataError(f"{prefix}, but not file_name; rename the column with the file paths {DOCS_HINT}")
        self._caption_column = find_caption_column(table.name, columns, column)
        self._names = functools.cache(list_folder)  # list each folder only once
        self._seen: set[str] = set()
        self._missing: list[str] = []
        self._outside: list[str] = []
        for location, row in rows.items():
            LIVENESS.record_progress()
            self._add_row(f"{table.name} {location}", row)
        if self._outside:
            count = len(self._outside)
            self.notes.append(f"{table.name} lists {count} files outside of {self.source}, first: {self._outside[0]}")
        self.samples.sort(key=lambda sample: sample.id)
        self.check(max_bad_fraction)

    def check(self, max_bad_fraction: float) -> None:
        try:
            super().check(max_bad_fraction)
        except DataError as error:
            if self._missing:
                raise DataError(f"{self._missing[0]} not found in {self.source} {DOCS_HINT}") from error
            raise

    def _add_row(self, where: str, values: dict[str, Any]) -> None:
        name, text = values.pop(self._file_column, None), values.pop(self._caption_column, None)
        negative = values.pop("negative_prompt", None)
        if not isinstance(name, str) or not self._is_media_file(name):
            if isinstance(name, str):
                self._missing.append(f"{where}: {to_printable(name)}")
            self.reject("no_media", f"{where}: {name}")
        elif not isinstance(text, str) or not text.strip() or not is_encodable([text, negative, values]):
            self.reject("no_prompt", f"{where}: {name}")
        elif (sample_id := self._make_id(name)) in self._seen:
            self.reject("ambiguous", f"{where}: {name}")
        else:
            self._seen.add(sample_id)
            prompt = Prompt(
                id=sample_id,
                text=text.strip(),
                negative_text=negative if isinstance(negative, str) and negative.strip() else None,
                metadata=values,
            )
            self.samples.append(Sample(id=sample_id, media=LocalFile(self._resolve_path(name)), prompt=prompt))

    def _resolve_path(self, name: str) -> str:
        return os.path.normpath(self.table.parent / name)

    def _is_media_file(self, name: str) -> bool:
        if "\0" in name or os.path.splitext(name)[1].lower() not in MEDIA_SUFFIXES:
            return False
        folder, file = os.path.split(self._resolve_path(name))
        return file in self._names(folder)

    def _make_id(self, name: str) -> str:
        path, top = self._resolve_path(name), os.path.normpath(self.table.parent)
        is_inside = os.path.commonpath([os.path.abspath(path), os.path.abspath(top)]) == os.path.abspath(top)
        if not is_inside:
            self._outside.append(to_printable(name))
        relative = os.path.relpath(path, top) if is_inside else os.path.normpath(name)
        return to_printable(os.path.splitext(relative)[0])


def find_caption_column(source: str, columns: Sequence[str], wanted: str | None) -> str:
    """Return the caption column: `wanted` or, if it is None, the first of CAPTION_COLUMNS that is in `columns`.

    source: name of the dataset, for error messages. Raises DataError if `columns` has no such column.
    """
    if wanted is not None and wanted not in columns:
        raise DataError(f"{describe_columns(source, columns)}, but not data.caption_column {wanted} {DOCS_HINT}")
    column = wanted or next((name for name in CAPTION_COLUMNS if name in columns), None)
    if column is None:
        prefix = describe_columns(source, columns)
        raise DataError(f"{prefix}, but not text, prompt or caption; set data.caption_column {DOCS_HINT}")
    return column


def describe_columns(source: str, columns: Sequence[str]) -> str:
    rest = f" and {len(columns) - MAX_COLUMNS_SHOWN} more" if len(columns) > MAX_COLUMNS_SHOWN else ""
    return to_printable(f"{source} has the columns {', '.join(columns[:MAX_COLUMNS_SHOWN])}{rest}")


def read_rows(table: Path) -> TableRows:
    """Read the rows of a .jsonl, .csv (UTF-8) or .parquet file. Raises DataError if a line is invalid."""
    suffix = table.suffix.lower()
    if suffix == ".parquet":
        return read_parquet_rows(table)
    if suffix not in (".jsonl", ".csv"):
        raise DataError(f"{table} is neither a .csv nor a .jsonl file")
    try:
        if suffix == ".jsonl":
            lines = split_lines(read_regular(table))
            return {f"line {number}": parse_json_row(table, number, line) for number, line in lines}
        with io.TextIOWrapper(open_regular(table), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            return {f"line {reader.line_num}": parse_csv_row(table, reader.line_num, row) for row in reader}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read: {error}") from error


def parse_json_row(table: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{table}: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{table}: line {number} is not a JSON object")
    return row


def parse_csv_row(table: Path, number: int, row: Mapping[str | None, Any]) -> dict[str, Any]:
    if None in row or None in row.values():
        raise DataError(f"{table}: line {number} has more or fewer fields than the header")
    return {str(name): value for name, value in row.items()}


def read_parquet_rows(table: Path) -> TableRows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{table} needs pyarrow: pip install "wfm_ds[datasets]"') from error
    try:
        rows = pyarrow.parquet.read_table(table).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{table} cannot be read: {error}") from error
    return {
        f"row {number}": {name: value for name, value in row.items() if isinstance(value, JSON_SCALAR)}
        for number, row in enumerate(rows, start=1)
    }
