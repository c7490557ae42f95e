"""The SFT folder: NAME.json with a prompt beside NAME.png or NAME.mp4. Finds and pairs files, decodes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Sample, SampleSet, parse_caption, printable
from wfm_ds.distributed.liveness import MOVES
from wfm_ds.errors import DataError
from wfm_ds.storage.regular import read_regular
from wfm_ds.types import Prompt


class PairedFolder(SampleSet):
    """Captioned media of a folder. An id is the path below it, without the last suffix, with forward slashes.

    Any depth and any case of suffix; other files, and whatever starts with a dot, are ignored. Links to folders are
    followed.
    """

    def __init__(self, folder: Path, *, max_bad_fraction: float) -> None:
        """Raises DataError if there is no usable sample, or if more than this share of the entries is bad."""
        super().__init__(str(folder))
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder: name one with NAME.json beside each NAME.png or NAME.mp4")
        entries = group_by_stem(folder)
        if not entries:
            raise DataError(f"{folder} holds no captioned media: put NAME.json beside each NAME.png or NAME.mp4")
        for sample_id in sorted(entries):
            MOVES.alive()
            self._add(sample_id, entries[sample_id])
        self.check(max_bad_fraction)

    def _add(self, sample_id: str, files: list[Path]) -> None:
        captions = [path for path in files if path.suffix.lower() == ".json"]
        media = [path for path in files if path.suffix.lower() != ".json"]
        if len(captions) > 1 or len(media) > 1:
            self.reject("ambiguous", str(files[0]))
        elif not media:
            self.reject("no_media", str(captions[0]))
        elif not captions:
            self.reject("no_json", str(media[0]))
        elif (prompt := read_caption(captions[0], sample_id)) is None:
            self.reject("no_prompt", str(captions[0]))
        else:
            self.samples.append(Sample(id=sample_id, media=LocalFile(media[0]), prompt=prompt))


def group_by_stem(folder: Path) -> dict[str, list[Path]]:
    """Captions and media below the folder by id; paths in sorted order."""
    entries: dict[str, list[Path]] = {}
    for path in sorted(walk(folder)):
        if path.suffix.lower() in MEDIA_SUFFIXES | {".json"}:
            entries.setdefault(file_id(path, folder), []).append(path)
    return entries


def file_id(path: Path, folder: Path) -> str:
    """Return the path below the folder without its last suffix, as text that UTF-8 can encode."""
    return printable(path.relative_to(folder).with_suffix("").as_posix())


def walk(folder: Path) -> Iterator[Path]:
    """All files below, each folder once even if links form a circle."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        MOVES.alive()
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error


def read_caption(path: Path, sample_id: str) -> Prompt | None:
    """The prompt of one caption file, or None if it has none or cannot be read."""
    try:
        return parse_caption(read_regular(path), sample_id)
    except OSError:
        return None
