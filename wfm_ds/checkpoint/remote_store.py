"""Checkpoints in S3. Incomplete checkpoints are ignored.

    s3://bucket/run/checkpoints/step_400/wfm_rank00000.safetensors, ...    the files of the local folder
    s3://bucket/run/checkpoints/step_400/COMPLETE                          the local COMPLETE, plus SHA-256 digests

COMPLETE is written after all other objects, and removed before a checkpoint is replaced or removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.checkpoint.store import COMPLETE, STEP_FOLDER, Checkpoint, steps_to_keep
from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import StorageError
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.filesystem import is_remote, open_filesystem
from wfm_ds.storage.transfer import ProgressCallback, ignore_progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A complete checkpoint in S3. All of its files exist and have the recorded sizes."""

    path: str
    step: int
    world_size: int
    metadata: Mapping[str, Any]
    files: Mapping[str, int]  # {file name: bytes}, without COMPLETE
    sha256: Mapping[str, str]  # {file name: digest}; {} if wfm_ds did not upload the checkpoint
    marker_text: str  # the text of COMPLETE


def read_checkpoint(address: str) -> RemoteCheckpoint | None:
    """Return the checkpoint at an s3:// address, or None if it is incomplete. Raises StorageError if S3 fails."""
    return _read_marker(address, transfer.list_objects(address))


def find_newest(root: str) -> RemoteCheckpoint | None:
    """Return the newest complete checkpoint in `root`, or None. Logs a warning for each newer incomplete checkpoint.

    Raises StorageError if S3 fails.
    """
    names = transfer.list_objects(root)
    for step in sorted(_step_numbers(names), reverse=True):
        checkpoint = _read_step(root, step, names)
        if checkpoint is not None:
            return checkpoint
        log.warning("%s/step_%d is damaged or incomplete and is skipped", root, step)
    return None


def find_flaws(root: str) -> list[str]:
    """Describe each checkpoint in `root` with a COMPLETE object but missing files. Raises StorageError if S3 fails."""
    names = transfer.list_objects(root)
    completed_steps = [step for step in sorted(_step_numbers(names)) if f"step_{step}/{COMPLETE}" in names]
    return [f"step_{step}: files are missing" for step in completed_steps if _read_step(root, step, names) is None]


def _read_step(root: str, step: int, names: Mapping[str, int]) -> RemoteCheckpoint | None:
    folder = f"step_{step}/"
    sizes = {name.removeprefix(folder): size for name, size in names.items() if name.startswith(folder)}
    return _read_marker(f"{root}/step_{step}", sizes)


def _read_marker(address: str, sizes: Mapping[str, int]) -> RemoteCheckpoint | None:
    if COMPLETE not in sizes:
        return None
    text = transfer.read_text(f"{address}/{COMPLETE}")
    try:
        marker = json.loads(text)
        checkpoint = RemoteCheckpoint(
            address,
            int(marker["step"]),
            int(marker["world_size"]),
            dict(marker["facts"]),
            dict(marker["files"]),
            dict(marker.get("sha256", {})),
            text,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # not a valid checkpoint
        return None
    return checkpoint if all(sizes.get(name) == size for name, size in checkpoint.files.items()) else None


def _step_numbers(names: Mapping[str, int]) -> set[int]:
    return {int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name.partition("/")[0]))}


def fetch_checkpoint(checkpoint: RemoteCheckpoint, folder: Path) -> Checkpoint:
    """Download a checkpoint to `folder` and check the SHA-256 of each file. Replaces an existing folder.

    An error leaves no incomplete `folder`. Raises StorageError if the download fails.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    try:
        with _explain_copy_errors(checkpoint.path, folder):
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            _fetch_files(checkpoint.path, checkpoint.files, temporary, checkpoint.sha256)
            atomic.write_text(temporary / COMPLETE, checkpoint.marker_text)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
            atomic.sync_to_disk(folder.parent)
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(folder, checkpoint.step, checkpoint.world_size, checkpoint.metadata)


@contextlib.contextmanager
def open_locally(path: str, near: Path) -> Iterator[Path]:
    """Yield a local path: `path` itself, or a temporary copy if `path` is an s3:// address.

    near: folder for the copy. If it does not exist, its closest existing parent is used. The files of a checkpoint are
    compared with their SHA-256 digests. Raises StorageError if the download fails.
    """
    if not is_remote(path):
        yield Path(path)
        return
    open_filesystem(path)  # refuses an address without a bucket
    address, sizes = path.rstrip("/"), transfer.list_objects(path.rstrip("/"))
    if not sizes:
        raise StorageError(f"{address}: not found")
    checkpoint = _read_marker(address, sizes)
    if checkpoint is None and COMPLETE in sizes:
        raise StorageError(f"{address} is damaged: files are missing or truncated; choose another checkpoint")
    parent = next(path for path in (near.absolute(), *near.absolute().parents) if path.is_dir())
    with atomic.temporary_folder(parent, ".wfm-checkpoint-") as temporary:
        folder = temporary / address.rpartition("/")[2]
        with show_wait(f"downloading {address}"):
            if checkpoint is not None:
                fetch_checkpoint(checkpoint, folder)
            else:
                with _explain_copy_errors(address, folder):
                    _fetch_files(address, sizes, folder, sha256={})
        yield folder


def _fetch_files(address: str, sizes: Mapping[str, int], folder: Path, sha256: Mapping[str, str]) -> None:
    for name, size in sizes.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise StorageError(f"{address} names the file {name} outside of its folder: use another checkpoint")
        file.parent.mkdir(parents=True, exist_ok=True)
        transfer.download_file(f"{address}/{name}", file, size=size, sha256=sha256.get(name))


@contextlib.contextmanager
def _explain_copy_errors(address: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{address} could not be copied to {folder} ({error}): free space there") from error


def publish_checkpoint(
    checkpoint: Checkpoint,
    address: str,
    *,
    before_complete: Callable[[], None],
    moved: ProgressCallback = ignore_progress,
) -> dict[str, int]:
    """Upload a local checkpoint. Return {name of each uploaded file: number of bytes}.

    before_complete: called after the upload of all files except COMPLETE. moved: called with the number of bytes of
    each uploaded part, to show progress. Raises StorageError if the upload fails, and OSError if a local file cannot be
    read.
    """
    marker = json.loads((checkpoint.path / COMPLETE).read_text(encoding="utf-8"))
    sizes: dict[str, int] = marker["files"]
    transfer.remove_objects([f"{address}/{COMPLETE}"])
    sha256 = {
        name: transfer.upload_file(checkpoint.path / name, f"{address}/{name}", size=size, on_progress=moved)
        for name, size in sizes.items()
    }
    before_complete()
    complete = (json.dumps(marker | {"sha256": sha256}, indent=1) + "\n").encode()
    transfer.put_object(complete, f"{address}/{COMPLETE}")
    return sizes | {COMPLETE: len(complete)}


def prune_checkpoints(root: str, *, newest: int, keep: int) -> None:
    """Remove old and incomplete checkpoints from S3. Raises StorageError if S3 fails.

    newest: step of the caller's newest checkpoint. keep: number of complete checkpoints to keep among the steps up to
    `newest`. Complete checkpoints of later steps are kept too, because another run wrote them.
    """
    names = transfer.list_objects(root)
    complete = {step for step in _step_numbers(names) if f"step_{step}/{COMPLETE}" in names}
    newer_complete = {step for step in complete if step > newest and _read_step(root, step, names) is not None}
    for step in _step_numbers(names) - steps_to_keep(complete, newest=newest, keep=keep) - newer_complete:
        objects = [name for name in names if name.startswith(f"step_{step}/")]
        ordered = sorted(objects, key=lambda name: not name.endswith(f"/{COMPLETE}"))
        transfer.remove_objects(f"{root}/{name}" for name in ordered)
