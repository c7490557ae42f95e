"""Atomic writes of files and folders: write under a temporary name, flush to disk, then rename."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk.

    Call this before renaming it, so that the final name never has incomplete content.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file in the same folder. It replaces `path` if the block succeeds.

    Concurrent writers use different temporary files, and the last writer wins. The file gets the default permissions,
    even if the code in the block creates it with access only for its owner, as safetensors does. Raises OSError.
    """
    part = path.with_name(f".{secrets.token_hex(8)}.part")
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


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically. Readers see the old text or the new text, never a mix. Raises OSError."""
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary folder. It replaces `final` if the block succeeds.

    If an earlier writer was killed, its temporary folder is first removed, and the folder that it was about to replace
    is restored. Raises OSError.
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
    """Return the number. Returns None if it is NaN or infinite, because JSON has no such numbers."""
    number = float(value)
    return number if math.isfinite(number) else None
