"""Layout detection for `data.kind: folder` from the names in the folder.

Each layout has a marker, such as the folder `metas/`. A folder without a marker has images, videos and caption files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import open_regular, shorten_path

LayoutKind = Literal["cosmos", "webdataset", "table", "hf", "media"]

TABLE_NAMES = tuple(f"metadata.{suffix}" for suffix in ("jsonl", "csv", "parquet"))
DOCS_HINT = "(see docs/data.md)"
CONVERSATION = re.compile(rb'"(conversations|messages)"\s*:\s*\[')
PROBED_BYTES = 1 << 16
LEROBOT_INFO = "meta/info.json"
LEROBOT_DEPTH = 2  # levels below data.path in which datasets are found
SAVED_FILES = ("state.json", "dataset_info.json")  # written by save_to_disk of `datasets`


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """The layout of a folder, and the file names that identified it, for messages."""

    kind: LayoutKind
    sign: str
    path: Path  # of the table, or of the folder for other layouts


def detect_layout(folder: Path) -> FolderLayout:
    """Detect the layout of a folder. Raises DataError if the folder cannot be listed, or is a LeRobot dataset."""
    names = list_names(folder)
    if os.path.isfile(folder / LEROBOT_INFO):
        raise DataError(f"{shorten_path(folder)} is a LeRobot dataset: set data.kind: lerobot (docs/robots.md)")
    if (sign := cosmos_sign(folder, names)) is not None:
        return FolderLayout("cosmos", sign, folder)
    if names and all(name.lower().endswith(".tar") for name in names):
        return FolderLayout("webdataset", f"only tar files: {len(names)}", folder)
    for parent in (folder, folder / "train"):
        for table in TABLE_NAMES:
            if os.path.isfile(parent / table):
                return FolderLayout("table", str((parent / table).relative_to(folder)), parent / table)
    if all(name in names for name in SAVED_FILES):
        return FolderLayout("hf", " and ".join(SAVED_FILES), folder)
    if (shards := parquet_sign(folder, names)) is not None:
        return FolderLayout("hf", shards, folder)
    if is_lerobot(folder):
        raise DataError(f"{shorten_path(folder)} contains LeRobot datasets: set data.kind: lerobot (docs/robots.md)")
    return FolderLayout("media", "default layout", folder)


def is_lerobot(folder: Path, depth: int = LEROBOT_DEPTH) -> bool:
    """Return whether a folder, or a folder at most `depth` levels below it, is a LeRobot dataset."""
    if os.path.isfile(folder / LEROBOT_INFO):
        return True
    if depth == 0:
        return False
    try:
        with os.scandir(folder) as entries:
            return any(entry.is_dir() and is_lerobot(Path(entry), depth - 1) for entry in entries)
    except OSError:
        return False


def list_names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except NotADirectoryError as error:
        if has_conversations(folder):
            raise DataError(conversation_message(folder)) from error
        raise DataError(f"{shorten_path(folder)} is a file: data.kind folder needs a folder in data.path") from error
    except FileNotFoundError as error:
        raise DataError(missing_folder_message(folder)) from error
    except OSError as error:
        raise DataError(f"{shorten_path(folder)} cannot be listed: {error.strerror}") from error


def has_conversations(file: Path) -> bool:
    """Return whether a .json or .jsonl file contains LLaVA conversations. Returns False if the file is unreadable."""
    if file.suffix.lower() not in (".json", ".jsonl"):
        return False
    try:
        with open_regular(file) as content:
            return CONVERSATION.search(content.read(PROBED_BYTES)) is not None
    except OSError:
        return False


def conversation_message(file: Path) -> str:
    return (
        f"{shorten_path(file)} contains conversations: set data.kind: llava and data.path to this file, as in the "
        "recipe reason_llava_sft (docs/reasoner.md)"
    )


def missing_folder_message(folder: Path) -> str:
    path = shorten_path(folder)
    if (command := demo_command(folder)) is not None:
        return f"{path} not found. Create it: {command}"
    return f"{path} not found. For a dataset of the Hugging Face Hub set data.kind: hf {DOCS_HINT}"


def demo_command(folder: Path) -> str | None:
    root = next((candidate for candidate in (folder, folder.parent) if candidate.name == "digits"), None)
    return None if root is None else f"wfm data digits {shorten_path(root)}"


def cosmos_sign(folder: Path, names: list[str]) -> str | None:
    media = next((name for name in ("videos", "images") if name in names), None)
    if media is None or "metas" not in names or not os.path.isdir(folder / "metas"):
        return None
    has_text = any(name.lower().endswith(".txt") for name in list_names(folder / "metas"))
    return f"metas/*.txt and {media}/" if has_text else None


def parquet_sign(folder: Path, names: list[str]) -> str | None:
    """Return a description of the parquet shards in the folder or its subfolder data/, or None if there are none."""
    inner = list_names(folder / "data") if "data" in names and os.path.isdir(folder / "data") else []
    for prefix, files in (("", names), ("data/", inner)):
        if shards := [name for name in files if name.lower().endswith(".parquet")]:
            return f"{prefix}{shards[0]}" + (f" and {len(shards) - 1} more" if shards[1:] else "")
    return None
