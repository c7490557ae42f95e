"""Layout detection for `data.kind: folder`, from file names. The first matching sign decides.

Lists at most three folders and opens no file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import shortened

Reading = Literal["cosmos", "webdataset", "table", "hf", "media"]

TABLES = tuple(f"metadata.{suffix}" for suffix in ("jsonl", "csv", "parquet"))
PAGE = "(see docs/data.md)"
SAVED = ("state.json", "dataset_info.json")  # written by save_to_disk of `datasets`


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a folder, and the sign it was detected by."""

    reading: Reading
    sign: str
    path: Path  # of the table, or of the folder for other layouts


def recognise(folder: Path) -> Layout:
    """Detect the layout of a folder. Raises DataError if the folder cannot be listed."""
    names = listed(folder)
    if (sign := cosmos_sign(folder, names)) is not None:
        return Layout("cosmos", sign, folder)
    if names and all(name.lower().endswith(".tar") for name in names):
        return Layout("webdataset", f"only tar files: {len(names)}", folder)
    for parent in (folder, folder / "train"):
        for table in TABLES:
            if os.path.isfile(parent / table):
                return Layout("table", str((parent / table).relative_to(folder)), parent / table)
    if all(name in names for name in SAVED):
        return Layout("hf", " and ".join(SAVED), folder)
    if (shards := parquet_sign(folder, names)) is not None:
        return Layout("hf", shards, folder)
    return Layout("media", "default layout", folder)


def listed(folder: Path) -> list[str]:
    """Return the names in a folder, sorted, without hidden ones. Raises DataError if it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except NotADirectoryError as error:
        raise DataError(f"{shortened(folder)} is a file: data.kind folder needs a folder in data.path") from error
    except FileNotFoundError as error:
        raise DataError(missing(folder)) from error
    except OSError as error:
        raise DataError(f"{shortened(folder)} cannot be listed: {error.strerror}") from error


def missing(folder: Path) -> str:
    """Return the message for a folder that does not exist, with a suggestion."""
    path = shortened(folder)
    if (command := maker_of(folder)) is not None:
        return f"{path} not found. Create it: {command}"
    return f"{path} not found. For a dataset of the Hugging Face Hub set data.kind: hf {PAGE}"


def maker_of(folder: Path) -> str | None:
    """Return the command that writes the digits demo if the missing folder belongs to it, else None."""
    root = next((candidate for candidate in (folder, folder.parent) if candidate.name == "digits"), None)
    return None if root is None else f"wfm data digits {shortened(root)}"


def cosmos_sign(folder: Path, names: list[str]) -> str | None:
    """Return the sign of a Cosmos folder, or None."""
    media = next((name for name in ("videos", "images") if name in names), None)
    if media is None or "metas" not in names or not os.path.isdir(folder / "metas"):
        return None
    has_text = any(name.lower().endswith(".txt") for name in listed(folder / "metas"))
    return f"metas/*.txt and {media}/" if has_text else None


def parquet_sign(folder: Path, names: list[str]) -> str | None:
    """Return the sign of a dataset in parquet shards, at the top or in data/, or None."""
    inner = listed(folder / "data") if "data" in names and os.path.isdir(folder / "data") else []
    for prefix, files in (("", names), ("data/", inner)):
        if shards := [name for name in files if name.lower().endswith(".parquet")]:
            return f"{prefix}{shards[0]}" + (f" and {len(shards) - 1} more" if shards[1:] else "")
    return None
