"""Hugging Face datasets: from the Hub, from `save_to_disk`, or as parquet shards.

Only rank 0 needs network access, because the other ranks read the arrow files that rank 0 caches.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wfm_ds.data.caption_table import find_caption_column
from wfm_ds.data.folder_layout import DOCS_HINT, SAVED_FILES
from wfm_ds.data.media_inputs import MediaInputs, check_edit_columns, suggest_columns
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Media, Sample, SampleSet, file_identity, is_encodable
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.types import SOURCE, Prompt

DEFAULT_SUFFIX = {"Image": ".png", "Video": ".mp4"}  # for bytes without a file name; images are detected by content
NEGATIVE_COLUMN = "negative_prompt"


@dataclass(frozen=True, slots=True)
class HfColumn:
    """A column with images or videos in arrow files."""

    files: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class HfMedia:
    """An image or video in one row of a Hugging Face dataset."""

    column: HfColumn
    row: int
    suffix: str

    @property
    def name(self) -> str:
        return f"{self.column.files[0]}#{self.row}"

    def open(self) -> BinaryIO:
        content = open_column(self.column)[self.row][self.column.name]["bytes"]
        return io.BytesIO(content)

    def identity(self) -> tuple[str | int, ...]:
        return *file_identity(Path(self.column.files[0])), self.row, self.column.name


@functools.lru_cache(maxsize=8)
def open_column(source: HfColumn) -> Any:
    """Return a memory-mapped dataset with only this column. Each row has the keys bytes and path."""
    from datasets import Dataset, concatenate_datasets

    dataset = concatenate_datasets([Dataset.from_file(file) for file in source.files]).select_columns([source.name])
    return disable_decoding(dataset, source.name)


def disable_decoding(dataset: Any, column: str) -> Any:
    return dataset.cast_column(column, type(dataset.features[column])(decode=False))


class HfDataset(SampleSet):
    """Captioned images or videos of one split. Ids are SPLIT/ROW, such as train/000000012."""

    def __init__(self, data: DataRecipe, path: str, inputs: MediaInputs) -> None:
        """Load the split data.split with the columns and options of the recipe.

        If data.image_column is not set, the only column with images or videos that is not an input is used. If
        data.caption_column is not set, the first existing column in CAPTION_COLUMNS is used. Raises DataError if the
        dataset cannot be loaded, a column is missing, there is no usable sample, or more than data.max_bad_fraction of
        the rows are bad.
        """
        super().__init__(path)
        dataset = load_split(path, data.split, data.options)
        media_column, kind, input_columns = find_columns(dataset.features, self.source, data.image_column, inputs)
        text_column = find_caption_column(self.source, dataset.column_names, data.caption_column)
        files = tuple(entry["filename"] for entry in dataset.cache_files)
        media = list_media(dataset, HfColumn(files, media_column), DEFAULT_SUFFIX[kind])
        images = {
            name: list_media(dataset, HfColumn(files, column), DEFAULT_SUFFIX["Image"])
            for name, column in input_columns.items()
        }
        extra_columns = metadata_columns(dataset, {media_column, text_column})
        rows = zip(media, dataset.data.column(text_column).to_pylist(), strict=True)
        with track_progress(rows, "reading captions", total=len(media)) as tracked:
            for row, (item, caption) in enumerate(tracked):
                sample_id, metadata = (
                    f"{data.split}/{row:09}",
                    {name: column[row] for name, column in extra_columns.items()},
                )
                found = {name: column[row] for name, column in images.items()}
                result = parse_row(sample_id, item, caption, metadata, found, inputs)
                if isinstance(result, Sample):
                    self.samples.append(result)
                else:
                    self.reject(result, f"{self.source} {sample_id}")
        self.check(data.max_bad_fraction)


def parse_row(
    sample_id: str,
    media: Media | None,
    text: Any,
    metadata: dict[str, Any],
    images: Mapping[str, Media | None],
    inputs: MediaInputs,
) -> Sample | str:
    """Return the sample of a row. If the row is unusable, return the reason, a key of REASONS.

    metadata: {column: value} of the columns other than image or video and caption. images: input images by name.
    """
    negative = metadata.pop(NEGATIVE_COLUMN, None)
    if media is None:
        return "no_media"
    if not isinstance(text, str) or not text.strip() or not is_encodable([text, negative, metadata]):
        return "no_prompt"
    found = {name: image for name, image in images.items() if image is not None}
    if isinstance(assigned := inputs.assign(media, found), str):
        return assigned
    prompt = Prompt(id=sample_id, text=text.strip(), negative_text=negative or None, metadata=metadata)
    return Sample(id=sample_id, media=assigned[0], prompt=prompt, images=assigned[1])


def load_split(path: str, split: str, options: dict[str, Any]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f'{path} needs the `datasets` library: pip install "wfm_ds[datasets]"') from error
    is_folder = os.path.isdir(path)
    try:
        if is_folder and (is_saved_dataset(path) or os.path.isfile(os.path.join(path, "dataset_dict.json"))):
            dataset = datasets.load_from_disk(path)
            if isinstance(dataset, datasets.DatasetDict):
                if split not in dataset:
                    raise DataError(
                        f"{path} has the splits {', '.join(dataset)}: set data.split to one of them {DOCS_HINT}"
                    )
                dataset = dataset[split]
        else:
            dataset = datasets.load_dataset(path, split=split, **options)
    except DataError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        fetch = "" if is_folder else f". On a machine with network access: hf download --repo-type dataset {path}"
        raise DataError(f"{path} cannot be loaded by the `datasets` library ({reason}){fetch} {DOCS_HINT}") from error
    return dataset.flatten_indices() if getattr(dataset, "_indices", None) is not None else dataset


def is_saved_dataset(path: str) -> bool:
    return all(os.path.isfile(os.path.join(path, name)) for name in SAVED_FILES)


def find_columns(
    features: Mapping[str, Any], source: str, wanted: str | None, inputs: MediaInputs
) -> tuple[str, str, dict[str, str]]:
    """Return the column of the samples' images or videos, its type, `Image` or `Video`, and {input: column}.

    wanted: see `find_media_column`. Raises DataError if a column is missing, or if the columns do not show which image
    is the source and which one is the edited image.
    """
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    columns = {name: inputs.column(name) for name in inputs.names if inputs.column(name) in images}
    if inputs.names and not inputs.optional:
        others = [name for name in images if name not in columns.values()]
        target = wanted or (others[0] if len(others) == 1 else "")
        what = f"{source} has images in the columns {', '.join(images) or 'none'}"
        check_edit_columns(what, images, target, inputs, is_named=wanted is not None or not target, usual="image")
    if not inputs.has_target and SOURCE in columns:
        return columns[SOURCE], "Image", columns
    if wanted in columns.values():
        raise DataError(f"{source}: {wanted} cannot be the edited image and an input: change data.image_column")
    rest = {name: feature for name, feature in features.items() if name not in columns.values()}
    try:
        return *find_media_column(rest, source, wanted), columns
    except DataError as error:
        if (advice := suggest_columns(images, "", inputs)) is None:
            raise
        raise DataError(f"{error}; for edits set data.inputs: [source], {advice}") from error


def find_media_column(features: Mapping[str, Any], source: str, wanted: str | None) -> tuple[str, str]:
    """Return the name of the column with images or videos, and its type, `Image` or `Video`.

    wanted: name of the column. None selects the only column with images or videos. Raises DataError if the column is
    missing or ambiguous.
    """
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    candidates = [name for name, kind in kinds.items() if kind in DEFAULT_SUFFIX]
    what = f"images or videos are in {', '.join(candidates)}" if candidates else "no column holds images or videos"
    if wanted is not None and wanted not in candidates:
        raise DataError(f"{source}: {what}, not in data.image_column {wanted} {DOCS_HINT}")
    if wanted is None and len(candidates) != 1:
        raise DataError(f"{source}: {what}; set data.image_column to the one to train on {DOCS_HINT}")
    column = wanted or candidates[0]
    return column, kinds[column]


def list_media(dataset: Any, source: HfColumn, default: str) -> list[Media | None]:
    import pyarrow.compute as pc

    column = disable_decoding(dataset, source.name).data.column(source.name)
    names = pc.struct_field(column, "path").to_pylist()
    empty = pc.is_null(pc.struct_field(column, "bytes")).to_pylist()
    return [row_media(source, row, *cells, default) for row, cells in enumerate(zip(names, empty, strict=True))]


def row_media(source: HfColumn, row: int, name: str | None, empty: bool, default: str) -> Media | None:
    if empty:
        return LocalFile(name) if name is not None and os.path.isfile(name) else None
    return HfMedia(source, row, media_suffix(name, default))


def media_suffix(name: str | None, default: str) -> str:
    suffix = os.path.splitext(name or "")[1].lower()
    return suffix if suffix in MEDIA_SUFFIXES else default


def metadata_columns(dataset: Any, used: set[str]) -> dict[str, list[Any]]:
    columns = {name: dataset.data.column(name) for name in dataset.column_names if name not in used}
    return {name: column.to_pylist() for name, column in columns.items() if is_json_type(column.type)}


def is_json_type(arrow_type: Any) -> bool:
    from pyarrow import types

    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    return any(is_one(arrow_type) for is_one in plain)
