"""Folders with a caption file NAME.txt or NAME.json next to each NAME.png or NAME.mp4.

The scan of a folder does not decode images and videos.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wfm_ds.data.caption_cache import CaptionCache, read_caption
from wfm_ds.data.folder_layout import demo_command
from wfm_ds.data.samples import (
    MEDIA_SUFFIXES,
    LocalFile,
    Sample,
    SampleSet,
    pack_prompt,
    parse_caption,
    parse_object,
    to_printable,
    unpack_prompt,
)
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import shorten_path
from wfm_ds.types import Prompt

TEXT_SUFFIXES = frozenset({".txt", ".caption"})
SUFFIXES = MEDIA_SUFFIXES | TEXT_SUFFIXES | {".json"}


class CaptionedFolder(SampleSet):
    """Captioned images and videos in a folder. Ids are relative paths with forward slashes, without the last suffix.

    The caption is the value of `prompt` in NAME.json. If there is none, it is the text of NAME.txt or NAME.caption, and
    NAME.json only adds metadata. Subfolders are scanned at any depth, also through links. Hidden files and other file
    types are ignored.
    """

    def __init__(
        self, folder: Path, *, max_bad_fraction: float, cache_dir: Path | None = None, default: str | None = None
    ) -> None:
        """Scan the folder.

        cache_dir: folder of the caption cache. None: captions are not cached. default: caption for images and videos
        without one. None: such files are rejected. Raises DataError if there is no usable sample, or if more than
        max_bad_fraction of the entries are bad.
        """
        super().__init__(str(folder))
        self.folder, self.default = folder, default
        self.num_default = 0
        self._num_objects = self._num_texts = 0  # JSON files, and media with a text caption
        self.lone_texts: list[str] = []  # text files without media of that name: notes, or captions of missing files
        if not os.path.isdir(folder):  # also False without permission
            if not os.path.lexists(folder) and (command := demo_command(folder)) is not None:
                raise DataError(f"{shorten_path(folder)} not found. Create it: {command}")
            raise DataError(
                f"{shorten_path(folder)} is not a folder. Use a folder with NAME.txt or NAME.json next to each "
                "NAME.png "
                "or NAME.mp4"
            )
        self._caption_cache = None if cache_dir is None else CaptionCache(folder, cache_dir, now_ns=time.time_ns())
        entries = group_by_stem(folder)
        for sample_id in sorted(entries):
            LIVENESS.record_progress()
            self._add_entry(sample_id, entries[sample_id])
        if not self.samples and not self.bad:
            raise DataError(self.empty_message())
        self._reject_lone_texts()
        if self._caption_cache is not None:
            self._caption_cache.save()
        if self.num_default:
            self.notes.append(f"{self.num_default} files without a caption use data.prompt")
        self.check(max_bad_fraction)

    def empty_message(self) -> str:
        return f"{self.source} has no captioned media: put NAME.txt or NAME.json next to each NAME.png or NAME.mp4"

    def _add_entry(self, sample_id: str, files: list[str]) -> None:
        suffixes = [os.path.splitext(path)[1].lower() for path in files]
        media = [path for path, suffix in zip(files, suffixes, strict=True) if suffix in MEDIA_SUFFIXES]
        texts = [path for path, suffix in zip(files, suffixes, strict=True) if suffix in TEXT_SUFFIXES]
        objects = [path for path, suffix in zip(files, suffixes, strict=True) if suffix == ".json"]
        self._num_objects += len(objects)
        if not media and not objects:
            self.lone_texts += texts
        elif len(objects) > 1 or len(media) > 1:
            self.reject("ambiguous", min(objects + media))
        elif not media:
            self.reject("no_media", objects[0])
        else:
            self._add_media(sample_id, media[0], objects, texts)

    def _add_media(self, sample_id: str, media_file: str, objects: list[str], texts: list[str]) -> None:
        prompt, metadata = read_json_caption(objects[0], sample_id, self._caption_cache) if objects else (None, {})
        if prompt is None and len(texts) > 1:
            self.reject("ambiguous", texts[0])
            return
        if prompt is None and texts and (text := read_caption(texts[0], self._caption_cache, join_lines)) is not None:
            prompt = Prompt(id=sample_id, text=text, metadata=metadata)
            self._num_texts += 1
        if prompt is None and not objects and not texts and self.default is not None:
            prompt = Prompt(id=sample_id, text=self.default)
            self.num_default += 1
        if prompt is not None:
            self.samples.append(Sample(id=sample_id, media=LocalFile(media_file), prompt=prompt))
        elif objects or texts:
            self.reject("no_prompt", (objects + texts)[0])
        else:
            self.reject("no_json", media_file)

    def _reject_lone_texts(self) -> None:
        """Reject text files that have no image or video, if they are probably captions and not notes.

        They are probably captions of missing files if no caption is a JSON file and most text files have an image or
        video.
        """
        if not self._num_objects and len(self.lone_texts) < self._num_texts:
            for path in self.lone_texts:
                self.reject("no_media", path)


def group_by_stem(folder: Path) -> dict[str, list[str]]:
    """Return {sample id: sorted paths of its media and caption files} for a folder and its subfolders."""
    entries: dict[str, list[str]] = {}
    start = len(os.path.join(folder, ""))
    for path in sorted(files_below(folder)):
        stem, suffix = os.path.splitext(path)
        if suffix.lower() in SUFFIXES:
            entries.setdefault(to_printable(stem[start:]), []).append(path)
    return entries


def file_id(path: Path, folder: Path) -> str:
    """Return a file's sample id: its path relative to the folder, without the last suffix, as valid UTF-8."""
    return to_printable(path.relative_to(folder).with_suffix("").as_posix())


def walk_paths(folder: Path) -> Iterator[Path]:
    return map(Path, files_below(folder))


def files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all visible files below a folder. Each folder is visited once, even if links form a cycle."""
    visited: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_raise_unreadable):
        real_path = os.path.realpath(parent)
        if real_path in visited:
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = [name for name in folders if not name.startswith(".")]
        LIVENESS.record_progress()
        yield from (os.path.join(parent, name) for name in files if not name.startswith("."))


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error


def read_json_caption(path: str, sample_id: str, cache: CaptionCache | None) -> tuple[Prompt | None, dict[str, Any]]:
    """Return the caption and metadata in a JSON file as (prompt, metadata).

    The result is (prompt, {}) if the file has a prompt, (None, the JSON object) if it has no prompt, and (None, {}) if
    the file is invalid.
    """

    def pack_content(data: bytes) -> list[Any] | dict[str, Any] | None:
        prompt = parse_caption(data, sample_id)
        return parse_object(data) if prompt is None else pack_prompt(prompt)[1:]

    content = read_caption(path, cache, pack_content)
    if isinstance(content, list):
        return unpack_prompt([sample_id, *content]), {}
    return None, content or {}


def join_lines(data: bytes) -> str | None:
    """Decode a text caption and join its lines with spaces. Returns None if it is empty or not UTF-8."""
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        return None
    return " ".join(line.strip() for line in lines if line.strip()) or None
