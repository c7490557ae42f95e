"""Checkpoints in S3: complete or absent there too. Local ones are store.py's.

    s3://bucket/run/checkpoints/step_400/wfm_rank00000.safetensors, ...    the files of the local folder
    s3://bucket/run/checkpoints/step_400/COMPLETE                          the local one, and each file's SHA-256

S3 renames nothing, so that COMPLETE alone decides: it goes first when a checkpoint is replaced or removed, and comes
last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.checkpoint.store import COMPLETE, STEP_FOLDER, Checkpoint, kept_steps
from wfm_ds.errors import StorageError
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.filesystem import is_remote
from wfm_ds.storage.transfer import Moved, ignore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """An address below which all files are there, in the sizes that they were written in."""

    path: str
    step: int
    world_size: int
    facts: Mapping[str, Any]
    files: Mapping[str, int]  # bytes by name, COMPLETE left out
    sha256: Mapping[str, str]  # by name; of what this module sent, all are there
    complete: str  # the text of COMPLETE


def read(address: str) -> RemoteCheckpoint | None:
    """Return the checkpoint at an s3:// address; None if it is not complete. Raises StorageError."""
    return _read(address, transfer.listing(address))


def newest(root: str) -> RemoteCheckpoint | None:
    """Return the complete checkpoint with the highest step below `root`. What it passes over is logged. Raises
    StorageError."""
    names = transfer.listing(root)
    for step in sorted(_steps(names), reverse=True):
        found = _read_step(root, step, names)
        if found is not None:
            return found
        log.warning("%s/step_%d is damaged or incomplete and is passed over", root, step)
    return None


def flaws(root: str) -> list[str]:
    """Name the checkpoints below `root` that were complete once and are not any more. Raises StorageError."""
    names = transfer.listing(root)
    marked = [step for step in sorted(_steps(names)) if f"step_{step}/{COMPLETE}" in names]
    return [f"step_{step} lacks files of its own" for step in marked if _read_step(root, step, names) is None]


def _read_step(root: str, step: int, names: Mapping[str, int]) -> RemoteCheckpoint | None:
    """Return the checkpoint of a step; `names`: all objects below `root`, with sizes."""
    folder = f"step_{step}/"
    inside = {name.removeprefix(folder): size for name, size in names.items() if name.startswith(folder)}
    return _read(f"{root}/step_{step}", inside)


def _read(address: str, sizes: Mapping[str, int]) -> RemoteCheckpoint | None:
    if COMPLETE not in sizes:
        return None
    text = transfer.read_text(f"{address}/{COMPLETE}")
    try:
        marker = json.loads(text)
        found = RemoteCheckpoint(
            address,
            int(marker["step"]),
            int(marker["world_size"]),
            dict(marker["facts"]),
            dict(marker["files"]),
            dict(marker.get("sha256", {})),
            text,
        )
    except (ValueError, KeyError, TypeError):  # any of them: this is none
        return None
    return found if all(sizes.get(name) == size for name, size in found.files.items()) else None


def _steps(names: Mapping[str, int]) -> set[int]:
    return {int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name.partition("/")[0]))}


def fetch(found: RemoteCheckpoint, folder: Path, *, moved: Moved = ignore) -> Checkpoint:
    """Make `folder` this checkpoint, complete or absent, each file compared with its SHA-256; one that is there is
    replaced. Raises StorageError."""
    making = folder.with_name(f"{folder.name}.tmp")
    try:
        if making.exists():
            shutil.rmtree(making)
        making.mkdir(parents=True)
        for name, size in found.files.items():
            file = _inside(making, name, found.path)
            file.parent.mkdir(parents=True, exist_ok=True)
            transfer.download(f"{found.path}/{name}", file, size=size, sha256=found.sha256.get(name), moved=moved)
        atomic.write_text(making / COMPLETE, found.complete)
        if folder.exists():
            shutil.rmtree(folder)
        making.rename(folder)
        atomic.sync(folder.parent)
    except StorageError:
        shutil.rmtree(making, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise StorageError(f"{found.path} could not be copied to {folder} ({error}): free space there") from error
    return Checkpoint(folder, found.step, found.world_size, found.facts)


@contextlib.contextmanager
def on_this_machine(place: str, beside: Path) -> Iterator[Path]:
    """Yield a path as it is, and what lies at an s3:// address as a temporary folder near `beside`, a checkpoint
    compared with its digests. Raises StorageError."""
    if not is_remote(place):
        yield Path(place)
        return
    address, sizes = place.rstrip("/"), transfer.listing(place.rstrip("/"))
    if not sizes:
        raise StorageError(f"{address}: there is nothing")
    found = _read(address, sizes)
    if found is None and COMPLETE in sizes:
        raise StorageError(f"{address} is damaged: files are missing or were cut off; choose another checkpoint")
    near = next(path for path in (beside.absolute(), *beside.absolute().parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".wfm-", dir=near) as temporary:
        folder = Path(temporary) / address.rpartition("/")[2]
        if found is not None:
            fetch(found, folder)
        else:
            _fetch_files(address, sizes, folder)
        yield folder


def _fetch_files(address: str, sizes: Mapping[str, int], folder: Path) -> None:
    try:
        for name, size in sizes.items():
            file = _inside(folder, name, address)
            file.parent.mkdir(parents=True, exist_ok=True)
            transfer.download(f"{address}/{name}", file, size=size)
    except OSError as error:
        raise StorageError(f"{address} could not be copied to {folder} ({error}): free space there") from error


def _inside(folder: Path, name: str, address: str) -> Path:
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise StorageError(f"{address} has {name}, which leads out of its folder: no run wrote that")
    return file


def publish(
    found: Checkpoint, address: str, *, before_complete: Callable[[], None], moved: Moved = ignore
) -> dict[str, int]:
    """Send a local checkpoint; `before_complete()` is called when all but COMPLETE is there. The bytes by name.

    Raises StorageError, and OSError when the local files cannot be read.
    """
    marker = json.loads((found.path / COMPLETE).read_text(encoding="utf-8"))
    sizes: dict[str, int] = marker["files"]
    transfer.remove([f"{address}/{COMPLETE}"])
    sha256 = {
        name: transfer.upload(found.path / name, f"{address}/{name}", size=size, moved=moved)
        for name, size in sizes.items()
    }
    before_complete()
    complete = (json.dumps(marker | {"sha256": sha256}, indent=1) + "\n").encode()
    transfer.put(complete, f"{address}/{COMPLETE}")
    return sizes | {COMPLETE: len(complete)}


def prune(root: str, *, newest: int, keep: int) -> None:
    """Remove all but the `keep` last complete checkpoints up to step `newest`, which is the caller's own, and what is
    not complete beyond it; a complete one beyond it is another run's, and stays. Raises StorageError."""
    names = transfer.listing(root)
    complete = {step for step in _steps(names) if f"step_{step}/{COMPLETE}" in names}
    others = {step for step in complete if step > newest and _read_step(root, step, names) is not None}
    for step in _steps(names) - kept_steps(complete, newest=newest, keep=keep) - others:
        inside = [name for name in names if name.startswith(f"step_{step}/")]
        first = sorted(inside, key=lambda name: not name.endswith(f"/{COMPLETE}"))
        transfer.remove(f"{root}/{name}" for name in first)
