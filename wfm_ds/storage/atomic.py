"""Atomic writes of files and folders: write under a temporary name, flush to disk, then rename."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PART_NAME = re.compile(r"\.[0-9a-f]{16}\.part")
MAKING_PREFIX = ".making-"
STALE_S = 3 * 24 * 3600.0  # a temporary file or folder that has not changed for so long has no writer any more


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk. Call this before renaming it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: Path, part_folder: Path | None = None) -> Iterator[Path]:
    """Yield the path of an empty temporary file. It replaces `path` if the block succeeds.

    part_folder: folder of the temporary file, on the same file system as `path`. None: the folder of `path`. If several
    processes write `path`, the last one wins. The final file has the default permissions. Raises OSError.
    """
    part = (part_folder or path.parent) / f".{secrets.token_hex(8)}.part"
    part.touch(exist_ok=False)
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        sync_to_disk(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def remove_part_files(paths: Iterable[Path]) -> None:
    """Remove the files among `paths` that `new_file` created as temporary files. Their writers must have ended."""
    for path in paths:
        if PART_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_stale(paths: Iterable[Path], now_s: float) -> None:
    """Remove the temporary files and folders that have not changed for STALE_S seconds. now_s: Unix time."""
    for path in paths:
        with contextlib.suppress(OSError):  # already removed, or of another user; it does no harm
            # Check files too: writing to a file does not change the modification time of its folder.
            if now_s - max(changed.lstat().st_mtime for changed in (path, *path.rglob("*"))) > STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str = MAKING_PREFIX) -> Iterator[Path]:
    """Yield a new folder in `parent`, removed at the end. Also removes stale ones with this prefix. Raises OSError."""
    remove_stale(parent.glob(temporary_pattern(prefix)), time.time())
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def temporary_pattern(prefix: str = MAKING_PREFIX) -> str:
    return prefix + 8 * "?"  # tempfile appends eight random characters


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically. Raises OSError."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary folder. It replaces `final` if the block succeeds.

    Also cleans up after a writer that was killed. Raises OSError.
    """
    making = final.with_name(f".{final.name}.wfm-tmp")  # users do not give such names to folders
    replaced = final.with_name(f".{final.name}.wfm-old")
    if replaced.exists() and not final.exists():
        replaced.rename(final)
    for leftover in (making, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    making.mkdir(parents=True)
    try:
        yield making
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    if final.exists():  # rename() cannot replace a folder that is not empty
        final.rename(replaced)
    making.rename(final)
    sync_to_disk(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
