"""Files and folders that are complete or absent: written under another name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file or one folder entry to the disk, so that a rename after it never outlives its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path`, to be written; it replaces `path` when the block ends without an exception.

    Each writer has a file of its own: of those that write one path at the same time the last wins. It has the mode of
    any new file, also where the writer makes one that only its owner can read (safetensors). Raises OSError.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    part.touch(exist_ok=False)
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the file by this UTF-8 text. A reader sees the old text or the new one, never a part. Raises OSError."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder beside `final`, which takes that name when the block ends without an exception.

    A folder that has the name already is replaced. What a killed writer left is dealt with first: the folder that it
    had already moved aside returns, everything else of it is removed. Raises OSError.
    """
    making = final.with_name(f".{final.name}.wfm-tmp")  # names that nobody gives to a folder of their own
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
    if final.exists():  # rename() does not replace a folder that has files
        final.rename(replaced)
    making.rename(final)
    sync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def finite_or_none(value: float) -> float | None:
    """Return the number as JSON may hold it: JSON has no NaN and no infinity."""
    number = float(value)
    return number if math.isfinite(number) else None
