"""Caption tables: metadata.jsonl, .csv or .parquet in the folder of the images and videos."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from wfm_ds.data.file_lists import FileFinder
from wfm_ds.data.folder_layout import DOCS_HINT
from wfm_ds.data.media_inputs import (
    NO_INPUTS,
    InputFolders,
    MediaInputs,
    check_edit_columns,
    find_named_files,
    single_files,
    suggest_columns,
)
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Media, Sample, SampleSet, is_encodable, to_printable
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import open_regular, read_regular
from wfm_ds.storage.json_lines import split_lines
from wfm_ds.types import SOURCE, Prompt

FILE_COLUMNS = ("file_name", "file", "image_path", "video_path", "image")
CAPTION_COLUMNS = ("text", "prompt", "caption")
MAX_COLUMNS_SHOWN = 12
JSON_SCALAR = str | int | float | bool | None  # values that JSON can represent
TableRows: TypeAlias = dict[str, dict[str, Any]]
"""{location, such as `line 7`: {column: value}}."""


class CaptionTable(SampleSet):
    """Captioned images and videos listed in a table. Ids are relative paths without suffix.

    Columns other than the file, the caption, `negative_prompt` and the input images become metadata. Files without a
    row are ignored.
    """

    def __init__(
        self,
        table: Path,
        *,
        column: str | None = None,
        image_column: str | None = None,
        inputs: MediaInputs = NO_INPUTS,
        max_bad_fraction: float,
    ) -> None:
        """column: name of the caption column. None selects the first of CAPTION_COLUMNS that exists. image_column: name
        of the column with the files. None selects the first of FILE_COLUMNS that exists.

        Raises DataError if the table cannot be read, a column is missing, the columns do not show which image is the
        source, there is no usable sample, or more than max_bad_fraction of the rows are bad.
        """
        super().__init__(str(table.parent))
        self.table = table
        rows = read_rows(table)
        if not rows:
            raise DataError(
                f"{table} is empty: write a line with file_name and text for each image or video {DOCS_HINT}"
            )
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        self._inputs, self._input_folders = inputs, InputFolders(inputs, table.parent)
        self._input_columns: dict[str, str] = {}
        self._file_column = self._choose_file_column(columns, image_column, rows)
        self._caption_column = find_caption_column(table.name, columns, column)
        self._files = FileFinder(table.parent)
        self._num_rows: Counter[str] = Counter()  # by sample id
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

    def _choose_file_column(self, columns: Sequence[str], wanted: str | None, rows: TableRows) -> str:
        """Return the column with the image or video of a sample, and set the columns of the input images."""
        inputs, prefix = self._inputs, describe_columns(self.table.name, columns)
        if wanted is not None and wanted not in columns:
            raise DataError(f"{prefix}, but not data.image_column {wanted} {DOCS_HINT}")
        images = list_media_columns(rows) if inputs.names else set()
        self._input_columns = {name: inputs.column(name) for name in inputs.names if inputs.column(name) in images}
        column = "" if inputs.has_target else self._input_columns.pop(inputs.original, "")
        used = set(self._input_columns.values())
        column = column or wanted or next((name for name in FILE_COLUMNS if name in columns and name not in used), "")
        is_named = wanted is not None or (column == FILE_COLUMNS[0] and inputs.has_target)
        if inputs.names and not inputs.optional:
            check_edit_columns(prefix, images, column, inputs, is_named=is_named, usual=FILE_COLUMNS[0])
        elif inputs.names and (advice := suggest_columns(images, column, inputs)) is not None:
            self.notes.append(f"for edits set data.inputs: [source], {advice}")
        if column in used:
            raise DataError(f"{prefix}: {column} cannot be the edited image and an input: change data.image_column")
        if not column:
            advice = "; rename the column with the file paths"
            if SOURCE in self._input_columns:
                advice = " (edited image): add it, or set data.target: false for RL from instruction and source alone"
            raise DataError(f"{prefix}, but not file_name{advice} {DOCS_HINT}")
        return column

    def _add_row(self, where: str, values: dict[str, Any]) -> None:
        name, text = values.pop(self._file_column, None), values.pop(self._caption_column, None)
        negative = values.pop("negative_prompt", None)
        path = self._files.find(name, MEDIA_SUFFIXES)
        files = {key: values.pop(column, None) for key, column in self._input_columns.items()}
        images = find_named_files(self._files, files)
        if path is None:
            if isinstance(name, str):
                self._missing.append(f"{where}: {to_printable(name)}")
            self.reject("no_media", f"{where}: {name}")
        elif not isinstance(text, str) or not text.strip() or not is_encodable([text, negative, values]):
            self.reject("no_prompt", f"{where}: {name}")
        elif (sample_id := self._make_id(name)) in self._num_rows and self._inputs.has_target:
            self.reject("ambiguous", f"{where}: {name}")
        elif isinstance(assigned := self._assign_images(path, sample_id, images), str):
            self.reject(assigned, f"{where}: {name}")
        else:
            self._num_rows[sample_id] += 1
            if self._num_rows[sample_id] > 1:  # several instructions for one source
                sample_id = f"{sample_id}:{self._num_rows[sample_id]}"
            prompt = Prompt(
                id=sample_id,
                text=text.strip(),
                negative_text=negative if isinstance(negative, str) and negative.strip() else None,
                metadata=values,
            )
            self.samples.append(Sample(id=sample_id, media=assigned[0], prompt=prompt, images=assigned[1]))

    def _assign_images(
        self, path: str, sample_id: str, images: Mapping[str, Media]
    ) -> tuple[Media, dict[str, Media]] | str:
        return self._inputs.assign(LocalFile(path), {**images, **single_files(self._input_folders.find(sample_id))})

    def _make_id(self, name: str) -> str:
        path, top = self._files.resolve(name), os.path.normpath(self.table.parent)
        is_inside = os.path.commonpath([os.path.abspath(path), os.path.abspath(top)]) == os.path.abspath(top)
        if not is_inside:
            self._outside.append(to_printable(name))
        relative = os.path.relpath(path, top) if is_inside else os.path.normpath(name)
        return to_printable(os.path.splitext(relative)[0])


def list_media_columns(rows: TableRows) -> set[str]:
    """Return the columns with names of image or video files."""
    return {
        column
        for row in rows.values()
        for column, value in row.items()
        if isinstance(value, str) and os.path.splitext(value)[1].lower() in MEDIA_SUFFIXES
    }


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
