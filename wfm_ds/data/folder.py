"""`data.kind: folder`: a folder read as what it is, or a sentence with the nearest right layout."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.data.caption_cache import user_cache
from wfm_ds.data.cosmos import CosmosFolder
from wfm_ds.data.hf import HfRows
from wfm_ds.data.layout import PAGE, Layout, listed, recognise
from wfm_ds.data.paired import PairedFolder, files_below
from wfm_ds.data.samples import IMAGE_SUFFIXES, MEDIA_SUFFIXES, VIDEO_SUFFIXES, SampleSet, printable
from wfm_ds.data.table import CaptionTable
from wfm_ds.data.webdataset import TarShards
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe

COMMAND = "wfm data captions"
NUM_NAMED = 3
NOT_READ = frozenset({".heic", ".heif", ".avif", ".gif", ".bmp", ".tiff", ".tif"})
KOHYA = re.compile(r"(\d+)_.+")


def folder_set(data: DataRecipe, folder: Path, layout: Layout | None = None) -> SampleSet:
    """Scan a folder as what it is recognised to be, or as `layout` says. Raises DataError as the readings do."""
    found = layout or recognise(folder)
    limit, cache_dir = data.max_bad_fraction, data.cache_dir or user_cache()
    if found.reading == "cosmos":
        return CosmosFolder(folder, allow_pickle=data.allow_pickle, max_bad_fraction=limit, cache_dir=cache_dir)
    if found.reading == "webdataset":
        return TarShards([str(folder / "*.tar")], cache_dir=data.cache_dir, max_bad_fraction=limit)
    if found.reading == "table":
        return CaptionTable(found.path, column=data.caption_column, max_bad_fraction=limit)
    if found.reading == "hf":
        return hf_set(data, str(folder))
    default = None if data.prompt is None else data.prompt.strip()
    return MediaFolder(folder, max_bad_fraction=limit, cache_dir=cache_dir, default=default)


def hf_set(data: DataRecipe, path: str) -> HfRows:
    """Load a data set of the library `datasets`. Raises DataError."""
    return HfRows(
        path,
        data.split,
        max_bad_fraction=data.max_bad_fraction,
        image_column=data.image_column,
        caption_column=data.caption_column,
        options=data.options,
    )


class MediaFolder(PairedFolder):
    """A paired folder whose layout nobody stated: where captions are missing, the message says what there is."""

    def described_empty(self) -> str:
        return empty_sentence(self.folder, self.source)

    def check(self, max_bad_fraction: float) -> None:
        try:
            super().check(max_bad_fraction)
        except DataError as error:
            bare = self.bad.get("no_json", [])
            if 2 * len(bare) <= sum(map(len, self.bad.values())):
                raise  # most of what is wrong is something else
            captioned = [sample.media.name for sample in self.samples] + self.bad.get("no_prompt", [])
            sentence = missing_captions(self.folder, self.source, bare, captioned, self.lone_texts)
            raise DataError(f"{sentence} {PAGE}") from error


def missing_captions(
    folder: Path, source: str, bare: Sequence[str], captioned: Sequence[str], lone_texts: Sequence[str]
) -> str:
    """Return the sentence for media without captions: `bare` are these, `captioned` the others of the folder."""

    def below(path: str) -> str:
        return printable(os.path.relpath(path, folder))

    what = kind_of([*bare, *captioned])
    if captioned:
        shown = ", ".join(map(below, bare[:NUM_NAMED]))
        return (
            f"{source}: {len(bare)} of {counted(len(bare) + len(captioned), what)} have no NAME.txt or NAME.json "
            f"({shown}): write them, remove the {what}, or set data.prompt for the rest"
        )
    found = counted(len(bare), what)
    if lone_texts:
        return (
            f"{source}: {found}, {len(lone_texts)} .txt files, no name in common ({below(bare[0])}, "
            f"{below(lone_texts[0])}): a caption must be named as its image, beside it"
        )
    if "videos" in listed(folder) and all(below(path).startswith("videos/") for path in bare):
        command = f'{COMMAND} {source} --layout cosmos --prompt "..."'
        return f"{source} has videos/ and no metas/: {command} writes metas/NAME.txt"
    return (
        f"{source}: {found}, no captions: put NAME.txt beside each, or set data.prompt to one caption for all, or: "
        f'{COMMAND} {source} --prompt "..."'
    )


def empty_sentence(folder: Path, source: str) -> str:
    """Return the sentence for a folder without an image, a video or a JSON file that could be a caption."""
    suffixes = Counter(os.path.splitext(path)[1].lower() for path in files_below(folder))
    unread = [(count, suffix) for suffix, count in suffixes.items() if suffix in NOT_READ]
    if unread:
        count, suffix = max(unread)
        return f"{source}: {counted(count, 'files')} {suffix}, which are not read: convert them to .png or .jpg {PAGE}"
    if suffixes[".tar"]:
        inner = next(path for path in sorted(files_below(folder)) if path.lower().endswith(".tar"))
        return (
            f"{source} holds no images or videos; {printable(inner)} is a tar file: name its folder in data.path {PAGE}"
        )
    return f"{source} holds no images or videos: put NAME.txt beside each NAME.png or NAME.mp4 {PAGE}"


def kind_of(paths: Sequence[str]) -> str:
    suffixes = {os.path.splitext(path)[1].lower() for path in paths} & MEDIA_SUFFIXES
    if suffixes <= IMAGE_SUFFIXES:
        return "images"
    return "videos" if suffixes <= VIDEO_SUFFIXES else "media"


def counted(count: int, what: str) -> str:
    return f"{count} {what[:-1] if count == 1 and what.endswith('s') else what}"
