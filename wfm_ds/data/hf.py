"""Data sets of the library `datasets`: by their id on the Hugging Face hub, saved to disk, or as parquet shards.

The library writes what it loads to arrow files once, in its own cache, and media are read from these by row: order, ids
and resuming are those of any other kind, and other ranks need the files and no network.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wfm_ds.data.layout import PAGE, SAVED
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Media, Sample, SampleSet, file_identity, is_encodable
from wfm_ds.data.table import CAPTION_COLUMNS
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.types import Prompt

DEFAULT_SUFFIX = {"Image": ".png", "Video": ".mp4"}  # of bytes without a name: pictures are known by their content
NEGATIVE = "negative_prompt"


@dataclass(frozen=True, slots=True)
class HfSource:
    """A column of arrow files with media."""

    files: tuple[str, ...]
    column: str


@dataclass(frozen=True, slots=True)
class HfMedium:
    """Media in a row of a data set."""

    source: HfSource
    row: int
    suffix: str

    @property
    def name(self) -> str:
        return f"{self.source.files[0]}#{self.row}"

    def open(self) -> BinaryIO:
        content = opened(self.source)[self.row][self.source.column]["bytes"]
        return io.BytesIO(content)

    def identity(self) -> tuple[str | int, ...]:
        return *file_identity(Path(self.source.files[0])), self.row


@functools.lru_cache(maxsize=8)
def opened(source: HfSource) -> Any:
    """Return the column as a data set whose rows are bytes and a name, memory-mapped; once a process."""
    from datasets import Dataset, concatenate_datasets

    found = concatenate_datasets([Dataset.from_file(file) for file in source.files]).select_columns([source.column])
    return undecoded(found, source.column)


def undecoded(dataset: Any, column: str) -> Any:
    """Return the data set with the bytes of its media instead of what the library would make of them."""
    return dataset.cast_column(column, type(dataset.features[column])(decode=False))


class HfRows(SampleSet):
    """Captioned media of one split. An id is the split and the row: 000000012 of train is train/000000012."""

    def __init__(
        self,
        path: str,
        split: str,
        *,
        max_bad_fraction: float,
        image_column: str | None = None,
        caption_column: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options`: more arguments of load_dataset, e.g. name and revision. The columns: None, the only one with
        images or videos, and the first of CAPTION_COLUMNS.

        Raises DataError where the library cannot load it, or it lacks a column, if there is no usable sample, or if
        more than this share of the rows is bad.
        """
        super().__init__(path)
        dataset = loaded(path, split, dict(options or {}))
        media_column, kind = media_column_of(dataset.features, self.source, image_column)
        text_column = text_column_of(dataset.column_names, self.source, caption_column)
        files = tuple(entry["filename"] for entry in dataset.cache_files)
        source = HfSource(files, media_column)
        media = media_of(dataset, source, DEFAULT_SUFFIX[kind])
        others = plain_columns(dataset, {media_column, text_column})
        for row, (medium, text) in enumerate(zip(media, dataset.data.column(text_column).to_pylist(), strict=True)):
            LIVENESS.advance()
            self._add(f"{split}/{row:09}", medium, text, {name: column[row] for name, column in others.items()})
        self.check(max_bad_fraction)

    def _add(self, sample_id: str, medium: Media | None, text: Any, metadata: dict[str, Any]) -> None:
        found = sample_of(sample_id, medium, text, metadata)
        if isinstance(found, Sample):
            self.samples.append(found)
        else:
            self.reject(found, f"{self.source} {sample_id}")


def sample_of(sample_id: str, medium: Media | None, text: Any, metadata: dict[str, Any]) -> Sample | str:
    """Return the sample of a row, or why it is none, a key of REASONS. `metadata`: the other columns."""
    negative = metadata.pop(NEGATIVE, None)
    if medium is None:
        return "no_media"
    if not isinstance(text, str) or not text.strip() or not is_encodable([text, negative, metadata]):
        return "no_prompt"
    prompt = Prompt(id=sample_id, text=text.strip(), negative_text=negative or None, metadata=metadata)
    return Sample(id=sample_id, media=medium, prompt=prompt)


def loaded(path: str, split: str, options: dict[str, Any]) -> Any:
    """Load one split, from a folder that save_to_disk wrote, or by load_dataset. Raises DataError."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f'{path} needs the library datasets: pip install "wfm_ds[datasets]"') from error
    folder = os.path.isdir(path)
    try:
        if folder and (saved(path) or os.path.isfile(os.path.join(path, "dataset_dict.json"))):
            found = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise DataError(f"{path} has the splits {', '.join(found)}: name one in data.split {PAGE}")
                found = found[split]
        else:
            found = datasets.load_dataset(path, split=split, **options)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        fetch = "" if folder else f"; on a machine with a network: hf download --repo-type dataset {path}"
        raise DataError(f"{path} cannot be loaded by the library datasets ({reason}){fetch} {PAGE}") from error
    return found.flatten_indices() if getattr(found, "_indices", None) is not None else found


def saved(path: str) -> bool:
    return all(os.path.isfile(os.path.join(path, name)) for name in SAVED)


def media_column_of(features: Mapping[str, Any], source: str, wanted: str | None) -> tuple[str, str]:
    """Return the column with the media, and `Image` or `Video`. Raises DataError where there is none, or several."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    found = [name for name, kind in kinds.items() if kind in DEFAULT_SUFFIX]
    if wanted is not None and wanted not in found:
        raise DataError(f"{source}: {listing(found)}, not in data.image_column {wanted} {PAGE}")
    if wanted is None and len(found) != 1:
        raise DataError(f"{source}: {listing(found)}; name the one to train on in data.image_column {PAGE}")
    column = wanted or found[0]
    return column, kinds[column]


def listing(columns: Sequence[str]) -> str:
    return f"images or videos are in {', '.join(columns)}" if columns else "no column holds images or videos"


def text_column_of(columns: Sequence[str], source: str, wanted: str | None) -> str:
    there = f"{source} has the columns {', '.join(columns)}"
    if wanted is not None and wanted not in columns:
        raise DataError(f"{there}: none is data.caption_column {wanted} {PAGE}")
    found = wanted or next((name for name in CAPTION_COLUMNS if name in columns), None)
    if found is None:
        raise DataError(f"{there}: none is text, prompt or caption; name it with data.caption_column {PAGE}")
    return found


def media_of(dataset: Any, source: HfSource, default: str) -> list[Media | None]:
    """Return the medium of each row, None of one that has none, without reading any bytes."""
    import pyarrow.compute as pc

    column = undecoded(dataset, source.column).data.column(source.column)
    names = pc.struct_field(column, "path").to_pylist()
    empty = pc.is_null(pc.struct_field(column, "bytes")).to_pylist()
    return [medium(source, row, *facts, default) for row, facts in enumerate(zip(names, empty, strict=True))]


def medium(source: HfSource, row: int, name: str | None, empty: bool, default: str) -> Media | None:
    if empty:
        return LocalFile(name) if name is not None and os.path.isfile(name) else None
    return HfMedium(source, row, suffix_of(name, default))


def suffix_of(name: str | None, default: str) -> str:
    suffix = os.path.splitext(name or "")[1].lower()
    return suffix if suffix in MEDIA_SUFFIXES else default


def plain_columns(dataset: Any, used: set[str]) -> dict[str, list[Any]]:
    """Return the other columns whose values JSON has a form for: they become metadata."""
    columns = {name: dataset.data.column(name) for name in dataset.column_names if name not in used}
    return {name: column.to_pylist() for name, column in columns.items() if is_plain(column.type)}


def is_plain(arrow_type: Any) -> bool:
    """Return whether JSON has a form for values of this type of arrow."""
    from pyarrow import types

    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(is_one(arrow_type) for is_one in plain)
