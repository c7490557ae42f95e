"""`data.kind: folder`: detect the layout of a folder and load it. Errors suggest the nearest valid layout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.data.caption_table import CaptionTable
from wfm_ds.data.captioned_folder import TEXT_SUFFIXES, CaptionedFolder, CosmosFolder
from wfm_ds.data.file_lists import files_below
from wfm_ds.data.folder_layout import (
    DOCS_HINT,
    FolderLayout,
    conversation_message,
    detect_layout,
    has_conversations,
    list_names,
)
from wfm_ds.data.hf_dataset import HfDataset
from wfm_ds.data.media_inputs import MediaInputs
from wfm_ds.data.samples import IMAGE_SUFFIXES, MEDIA_SUFFIXES, VIDEO_SUFFIXES, SampleSet, to_printable
from wfm_ds.data.webdataset import TarShards
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.shared_defaults import user_cache_folder

COMMAND = "wfm data captions"
NUM_NAMED = 3
UNSUPPORTED_SUFFIXES = frozenset({".heic", ".heif", ".avif", ".gif", ".bmp", ".tiff", ".tif"})


def load_folder(
    data: DataRecipe, folder: Path, layout: FolderLayout | None = None, inputs: MediaInputs | None = None
) -> SampleSet:
    """Scan a folder. Raises DataError.

    layout: how the folder is read. None: detect the layout. inputs: input images to find (default: of the recipe).
    """
    detected = layout or detect_layout(folder)
    inputs = inputs or MediaInputs.from_recipe(data, folder)
    unread = ["input_folders"] if data.input_folders and detected.kind not in ("table", "media") else []
    unread += ["inputs"] if data.image_inputs and detected.kind == "cosmos" else []
    for key in unread:
        raise DataError(f"{folder}: data.{key} cannot name images of this layout ({detected.sign}) {DOCS_HINT}")
    if detected.kind == "table":
        return CaptionTable(
            detected.path,
            column=data.caption_column,
            image_column=data.image_column,
            inputs=inputs,
            max_bad_fraction=data.max_bad_fraction,
        )
    if detected.kind == "media":
        return MediaFolder(
            folder,
            max_bad_fraction=data.max_bad_fraction,
            cache_dir=data.cache_dir or user_cache_folder(),
            default=None if data.prompt is None else data.prompt.strip(),
            inputs=inputs,
        )
    path = folder / "*.tar" if detected.kind == "webdataset" else folder
    return load_layout(data, detected.kind, [str(path)], inputs)


def load_layout(data: DataRecipe, kind: str, paths: Sequence[str], inputs: MediaInputs) -> SampleSet:
    """Scan data in the layout `kind`: `cosmos`, `webdataset` or `hf`. Only `webdataset` has several paths."""
    if kind == "webdataset":
        return TarShards(paths, cache_dir=data.cache_dir, max_bad_fraction=data.max_bad_fraction, inputs=inputs)
    (path,) = paths
    if kind == "hf":
        return HfDataset(data, path, inputs)
    return CosmosFolder(
        Path(path),
        allow_pickle=data.allow_pickle,
        max_bad_fraction=data.max_bad_fraction,
        cache_dir=data.cache_dir or user_cache_folder(),
    )


class MediaFolder(CaptionedFolder):
    """A CaptionedFolder for `data.kind: folder`. Its errors about missing captions suggest a fix."""

    def empty_message(self) -> str:
        if (file := find_conversations(self.folder)) is not None:
            return conversation_message(file)
        suffixes = Counter(os.path.splitext(path)[1].lower() for path in files_below(self.folder))
        unsupported = [(count, suffix) for suffix, count in suffixes.items() if suffix in UNSUPPORTED_SUFFIXES]
        if unsupported:
            count, suffix = max(unsupported)
            problem = f"{format_count(count, f'{suffix} files')}, an unsupported format. Convert to .png or .jpg"
            return f"{self.source}: {problem} {DOCS_HINT}"
        problem = "has no images or videos: put NAME.txt next to each NAME.png or NAME.mp4"
        if suffixes[".tar"]:
            inner = next(path for path in sorted(files_below(self.folder)) if path.lower().endswith(".tar"))
            problem = f"has no images or videos, but a tar file {to_printable(inner)}: set data.path to its folder"
        return f"{self.source} {problem} {DOCS_HINT}"

    def check(self, max_bad_fraction: float) -> None:
        try:
            super().check(max_bad_fraction)
        except DataError as error:
            if (file := find_conversations(self.folder)) is not None:
                raise DataError(conversation_message(file)) from error
            uncaptioned = self.bad.get("no_json", [])
            if 2 * len(uncaptioned) <= sum(map(len, self.bad.values())):
                raise  # missing captions are not the main problem
            captioned = [sample.media.name for sample in self.samples] + self.bad.get("no_prompt", [])
            message = missing_captions_message(self.folder, self.source, uncaptioned, captioned, self.lone_texts)
            raise DataError(f"{message} {DOCS_HINT}") from error


def missing_captions_message(
    folder: Path, source: str, uncaptioned: Sequence[str], captioned: Sequence[str], lone_texts: Sequence[str]
) -> str:
    def relative(path: str) -> str:
        return to_printable(os.path.relpath(path, folder))

    what = media_kind([*uncaptioned, *captioned])
    if captioned:
        examples = ", ".join(map(relative, uncaptioned[:NUM_NAMED]))
        return (
            f"{source}: {len(uncaptioned)} of {format_count(len(uncaptioned) + len(captioned), what)} have no "
            "NAME.txt or NAME.json "
            f"({examples}). Write them, remove the {what}, or set data.prompt for the rest"
        )
    count = format_count(len(uncaptioned), what)
    if (other := find_unknown_file(folder)) is not None:  # a command that writes files could damage the dataset
        return (
            f"{source}: {count} without captions, and the layout is unknown ({relative(other)} is not a caption). The "
            "layouts are in docs/data_layouts.md"
        )
    if lone_texts:
        return (
            f"{source}: {count} and {len(lone_texts)} .txt files have no names in common ({relative(uncaptioned[0])}, "
            f"{relative(lone_texts[0])}). Put each caption next to its image, with the same name"
        )
    if "videos" in list_names(folder) and all(relative(path).startswith("videos/") for path in uncaptioned):
        command = f'{COMMAND} {source} --layout cosmos --prompt "..."'
        return f"{source} has videos/ but no metas/. Create metas/NAME.txt: {command}"
    return (
        f"{source}: {count} without captions. Put NAME.txt next to each, set data.prompt to one caption for all, or: "
        f'{COMMAND} {source} --prompt "..."'
    )


def find_conversations(folder: Path) -> Path | None:
    parts = [os.path.splitext(name) for name in list_names(folder)]
    captioned = {stem for stem, suffix in parts if suffix.lower() in MEDIA_SUFFIXES}
    files = (folder / (stem + suffix) for stem, suffix in parts if stem not in captioned)
    return next((file for file in files if has_conversations(file)), None)


def find_unknown_file(folder: Path) -> str | None:
    """Return a file with an unknown suffix, such as a table or an index, or None if there is none."""
    known = MEDIA_SUFFIXES | TEXT_SUFFIXES | UNSUPPORTED_SUFFIXES | {"", ".md"}
    return min((path for path in files_below(folder) if os.path.splitext(path)[1].lower() not in known), default=None)


def media_kind(paths: Sequence[str]) -> str:
    suffixes = {os.path.splitext(path)[1].lower() for path in paths} & MEDIA_SUFFIXES
    if suffixes <= IMAGE_SUFFIXES:
        return "images"
    return "videos" if suffixes <= VIDEO_SUFFIXES else "media"


def format_count(count: int, what: str) -> str:
    return f"{count} {what[:-1] if count == 1 and what.endswith('s') else what}"
