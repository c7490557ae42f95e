"""The reading of a folder that `data.kind: folder` names: what its top shows, in a fixed order of which the first sign
counts. Lists at most three folders and opens nothing."""

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
SAVED = ("state.json", "dataset_info.json")  # what datasets' save_to_disk writes


@dataclass(frozen=True, slots=True)
class Layout:
    """Reading of a folder, and the sign that says so."""

    reading: Reading
    sign: str
    path: Path  # the table; else the folder


def recognise(folder: Path) -> Layout:
    """Return how a folder is to be read. Raises DataError where there is no folder that can be listed."""
    names = listed(folder)
    if (found := cosmos_sign(folder, names)) is not None:
        return Layout("cosmos", found, folder)
    if names and all(name.lower().endswith(".tar") for name in names):
        return Layout("webdataset", f"{len(names)} tar files and nothing else", folder)
    for parent in (folder, folder / "train"):
        for table in TABLES:
            if os.path.isfile(parent / table):
                return Layout("table", str((parent / table).relative_to(folder)), parent / table)
    if all(name in names for name in SAVED):
        return Layout("hf", " and ".join(SAVED), folder)
    if (shards := parquet_sign(folder, names)) is not None:
        return Layout("hf", shards, folder)
    return Layout("media", "no sign of another layout", folder)


def listed(folder: Path) -> list[str]:
    """Return the names in a folder that do not begin with a dot, sorted."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except NotADirectoryError as error:
        raise DataError(f"{shortened(folder)} is a file: data.path names a folder for kind folder") from error
    except FileNotFoundError as error:
        raise DataError(missing(folder)) from error
    except OSError as error:
        raise DataError(f"{shortened(folder)} cannot be listed: {error.strerror}") from error


def missing(folder: Path) -> str:
    """Return the sentence for a folder that does not exist, with the nearest thing that could be meant."""
    shown = shortened(folder)
    if (made := maker_of(folder)) is not None:
        return f"{shown} is not there: {made} makes it"
    return f"{shown} is no folder here; for a data set of the Hugging Face hub set data.kind: hf {PAGE}"


def maker_of(folder: Path) -> str | None:
    """Return the command that makes the quickstart's digits where a missing folder is or lies in theirs; else None."""
    root = next((place for place in (folder, folder.parent) if place.name == "digits"), None)
    return None if root is None else f"wfm data digits {shortened(root)}"


def cosmos_sign(folder: Path, names: list[str]) -> str | None:
    media = next((name for name in ("videos", "images") if name in names), None)
    if media is None or "metas" not in names or not os.path.isdir(folder / "metas"):
        return None
    has_text = any(name.lower().endswith(".txt") for name in listed(folder / "metas"))
    return f"metas/*.txt and {media}/" if has_text else None


def parquet_sign(folder: Path, names: list[str]) -> str | None:
    """Return the sign of a data set in parquet shards, at the top or in data/; None without any."""
    inner = listed(folder / "data") if "data" in names and os.path.isdir(folder / "data") else []
    for place, found in (("", names), ("data/", inner)):
        if shards := [name for name in found if name.lower().endswith(".parquet")]:
            return f"{place}{shards[0]}" + (f" and {len(shards) - 1} more" if shards[1:] else "")
    return None
