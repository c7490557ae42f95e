"""Input images and videos, such as `data.inputs: [source]`: which ones samples need, and which file is the target."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wfm_ds.data.file_lists import FileFinder, files_by_id
from wfm_ds.data.input_files import input_suffixes
from wfm_ds.data.samples import LocalFile, Media, to_printable
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.types import CONTROL, MEDIA_INPUTS, SOURCE

# Usual column names of edit data. If they occur, the column `image` may be the source or the edited image.
SOURCE_COLUMNS = ("original_image", "input_image", "source_image")
TARGET_COLUMNS = ("edited_image", "output_image", "target_image", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInputs:
    """The input images and videos of a data set's samples."""

    names: Sequence[str] = ()  # in MEDIA_INPUTS
    columns: Mapping[str, str] = field(default_factory=dict)  # data.input_columns
    folders: Mapping[str, Path] = field(default_factory=dict)  # data.input_folders
    has_target: bool = True  # False: the image of a sample is its source
    optional: bool = False  # True: samples without these images, or with their own image as an input, are valid

    @classmethod
    def from_recipe(cls, data: DataRecipe, folder: Path = Path()) -> MediaInputs:
        """folder: the data set's folder, to which paths in data.input_folders are relative."""
        return cls(
            names=data.media_inputs,
            columns=dict(data.input_columns.items()),
            folders={name: folder / path for name, path in data.input_folders.items()},
            has_target=data.target,
        )

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    @property
    def original(self) -> str:
        """The input that a sample's image or video is if there are no targets."""
        return find_original(self.names)

    def assign(
        self, media: Media, found: Mapping[str, Media], *, is_pair: bool = False
    ) -> tuple[Media, dict[str, Media]] | str:
        """Return (image or video, input images) of a sample. If it is unusable, return the reason, a key of REASONS.

        media: the target, or the source if no source is in `found` and the data set has no targets. found: input
        images by name. is_pair: whether the sample is a preference pair, whose chosen image may be an input: the model
        learns to prefer no change.
        """
        images = {name: found[name] for name in self.names if name in found}
        if not self.has_target and self.names:
            media = images.setdefault(self.original, media)
        if not self.optional:
            if len(images) < len(self.names):
                return "no_source"
            if self.has_target and not is_pair and media in images.values():
                return "same_file"
        return media, images


def find_original(names: Collection[str]) -> str:
    """Return the input that a sample's image or video is if there are no targets. names: inputs of the data set."""
    return CONTROL if CONTROL in names and SOURCE not in names else SOURCE


NO_INPUTS = MediaInputs()
ANY_INPUTS = MediaInputs(names=sorted(MEDIA_INPUTS), optional=True)


class InputFolders:
    """The files of `data.input_folders`. An input image has the relative path of its sample, except for the suffix."""

    def __init__(self, inputs: MediaInputs, folder: Path) -> None:
        """folder: folder of the samples. Raises DataError if an input folder is missing or equal to it."""
        self._files: dict[str, dict[str, list[str]]] = {}
        self._inside: list[str] = []  # prefixes of ids of images in input folders that are inside `folder`
        for name, path in inputs.folders.items():
            if not os.path.isdir(path):
                raise DataError(f"data.input_folders.{name}: {path} is not a folder")
            if os.path.realpath(path) == os.path.realpath(folder):
                raise DataError(f"data.input_folders.{name}: {path} contains the edited images: name another folder")
            self._files[name] = files_by_id(path, input_suffixes(name))
            self._inside.append(to_printable(os.path.relpath(path, folder)) + os.sep)

    def contains(self, sample_id: str) -> bool:
        """Return whether an id in the folder of the samples belongs to an image in an input folder."""
        return sample_id.startswith(tuple(self._inside))

    def find(self, sample_id: str) -> dict[str, list[str]]:
        """Return {input name: image files}."""
        return {name: files.get(sample_id, []) for name, files in self._files.items()}


def find_named_files(finder: FileFinder, names: Mapping[str, Any]) -> dict[str, Media]:
    """Return {input: file} for {input: file name}, without missing files and files of other types."""
    paths = {name: finder.find(value, input_suffixes(name)) for name, value in names.items()}
    return {name: LocalFile(path) for name, path in paths.items() if path is not None}


def single_files(files: Mapping[str, Sequence[str]]) -> dict[str, Media]:
    """Return {name: file} without names that have no file or several files."""
    return {name: LocalFile(paths[0]) for name, paths in files.items() if len(paths) == 1}


def check_edit_columns(
    what: str, images: Collection[str], target: str, inputs: MediaInputs, *, is_named: bool, usual: str
) -> None:
    """Raise DataError unless the columns show which image is the source and which one is the edited image.

    what: text with the names of all columns. images: columns with images. target: column of the image of a sample; ""
    if it is unknown. is_named: whether the user or the name of the column `target` shows what it contains. usual: name
    of the column with the edited image, for messages.
    """
    missing = [name for name in inputs.names if inputs.column(name) not in images and name not in inputs.folders]
    if not inputs.has_target and inputs.original not in inputs.columns:
        missing = [name for name in missing if name != inputs.original]  # it is in the column `target`
    advice = suggest_columns(images, target, inputs)
    for name in missing:
        if name in inputs.columns:
            raise DataError(f"{what}, but no files in data.input_columns.{name} {inputs.columns[name]}")
        if name != SOURCE:
            raise DataError(f"{what}, but no files in {name}: add them, or set data.input_columns.{name} to a column")
        reading = "" if is_named or not target else f", so {target} would be read as the edited image"
        keys = advice or (
            "data.target: false for RL from instruction and source alone, or name the columns "
            f"{usual} (edited image) and source"
        )
        raise DataError(f"{what}, but no source images{reading}: set {keys}")
    if advice is not None and not is_named:
        raise DataError(f"{what}, so the content of {target} is uncertain: set {advice}")


def suggest_columns(images: Collection[str], target: str, inputs: MediaInputs) -> str | None:
    """Return the keys to set for edit data. Return None if the names of the columns do not show them.

    images, target: see `check_edit_columns`.
    """
    if SOURCE not in inputs.names and inputs.names:
        return None
    others = {name for name in images if name != target and name not in map(inputs.column, inputs.names)}
    source = next((name for name in SOURCE_COLUMNS if name in others), None)
    edited = next((name for name in TARGET_COLUMNS if name in others), None)
    if not inputs.has_target:
        is_known = inputs.column(SOURCE) in images
        return None if source is None or is_known else f"data.input_columns: {{source: {source}}}"
    if SOURCE in inputs.folders or (source is None and edited is None):
        return None
    source = inputs.column(SOURCE) if inputs.column(SOURCE) in images else source or target
    edited = edited or target
    if not source or not edited:
        return None
    return f"data.image_column: {edited} and data.input_columns: {{source: {source}}}"
