"""The SFT folder: NAME.json with a prompt beside NAME.png or NAME.mp4. Finds and pairs files, decodes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wfm_ds.data.caption_cache import CaptionCache, read_caption
from wfm_ds.data.samples import (
    MEDIA_SUFFIXES,
    LocalFile,
    Sample,
    SampleSet,
    pack_prompt,
    parse_caption,
    printable,
    unpack_prompt,
)
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import shortened
from wfm_ds.types import Prompt

SUFFIXES = MEDIA_SUFFIXES | {".json"}


class PairedFolder(SampleSet):
    """Captioned media of a folder. An id is the path below it, without the last suffix, with forward slashes.

    Any depth and any case of suffix; other files, and whatever starts with a dot, are ignored. Links to folders are
    followed.
    """

    def __init__(self, folder: Path, *, max_bad_fraction: float, cache_dir: Path | None = None) -> None:
        """`cache_dir`: where captions are kept for the next scan (caption_cache.py); None: nowhere.

        Raises DataError if there is no usable sample, or if more than this share of the entries is bad.
        """
        super().__init__(str(folder))
        if not os.path.isdir(folder):  # not an error where we may not look
            raise DataError(
                f"{shortened(folder)} is not a folder: name one with NAME.json beside each NAME.png or NAME.mp4"
            )
        kept = None if cache_dir is None else CaptionCache(folder, cache_dir, now_ns=time.time_ns())
        entries = group_by_stem(folder)
        if not entries:
            raise DataError(f"{folder} holds no captioned media: put NAME.json beside each NAME.png or NAME.mp4")
        for sample_id in sorted(entries):
            LIVENESS.advance()
            self._add(sample_id, entries[sample_id], kept)
        if kept is not None:
            kept.save()
        self.check(max_bad_fraction)

    def _add(self, sample_id: str, files: list[str], kept: CaptionCache | None) -> None:
        captions = [path for path in files if is_caption(path)]
        media = [path for path in files if not is_caption(path)]
        if len(captions) > 1 or len(media) > 1:
            self.reject("ambiguous", files[0])
        elif not media:
            self.reject("no_media", captions[0])
        elif not captions:
            self.reject("no_json", media[0])
        elif (prompt := read_prompt(captions[0], sample_id, kept)) is None:
            self.reject("no_prompt", captions[0])
        else:
            self.samples.append(Sample(id=sample_id, media=LocalFile(media[0]), prompt=prompt))


def is_caption(path: str) -> bool:
    return path[-5:].lower() == ".json"


def group_by_stem(folder: Path) -> dict[str, list[str]]:
    """Return captions and media below the folder by id; paths in sorted order."""
    entries: dict[str, list[str]] = {}
    start = len(os.path.join(folder, ""))
    for path in sorted(files_below(folder)):
        stem, suffix = os.path.splitext(path)
        if suffix.lower() in SUFFIXES:
            entries.setdefault(printable(stem[start:]), []).append(path)
    return entries


def file_id(path: Path, folder: Path) -> str:
    """Return the path below the folder without its last suffix, as text that UTF-8 can encode."""
    return printable(path.relative_to(folder).with_suffix("").as_posix())


def walk(folder: Path) -> Iterator[Path]:
    """Yield all files below, as `files_below` does."""
    return map(Path, files_below(folder))


def files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below, each folder once even if links form a circle."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        LIVENESS.advance()
        yield from (os.path.join(parent, name) for name in files if not name.startswith("."))


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error


def read_prompt(path: str, sample_id: str, kept: CaptionCache | None) -> Prompt | None:
    """Return the prompt of one caption file, or None if it has none or cannot be read."""

    def packed(data: bytes) -> list[Any] | None:
        prompt = parse_caption(data, sample_id)
        return None if prompt is None else pack_prompt(prompt)[1:]

    caption = read_caption(path, kept, packed)
    return None if caption is None else unpack_prompt([sample_id, *caption])
