"""Lists of the files in data folders. Each folder is listed once, because data folders may have millions of files."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from wfm_ds.data.samples import to_printable
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError


class FileFinder:
    """Finds files by their paths relative to a folder. The paths may point outside the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._list_names = functools.cache(list_folder)

    def resolve(self, name: str) -> str:
        return os.path.normpath(self._folder / name)

    def find(self, name: Any, suffixes: Collection[str]) -> str | None:
        """Return the normalized path of the file. Return None if it does not exist, or for any other value.

        suffixes: allowed suffixes in lower case.
        """
        if not isinstance(name, str) or "\0" in name or os.path.splitext(name)[1].lower() not in suffixes:
            return None
        path = self.resolve(name)
        folder, file = os.path.split(path)
        return path if file in self._list_names(folder) else None


def list_folder(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder or os.curdir))
    except OSError:
        return frozenset()


def files_by_id(folder: Path, suffixes: Collection[str]) -> dict[str, list[str]]:
    """Return {sample id: sorted files with one of these suffixes}. Return {} if the folder does not exist.

    An id is the file's path relative to the folder, without the last suffix. Bytes that are not UTF-8 are escaped.
    """
    files: dict[str, list[str]] = {}
    start = len(os.path.join(folder, ""))
    for path in sorted(files_below(folder)) if os.path.isdir(folder) else ():
        stem, suffix = os.path.splitext(path)
        if suffix.lower() in suffixes:
            files.setdefault(to_printable(stem[start:]), []).append(path)
    return files


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
