"""Download the starting checkpoint from `checkpoint.storage`, and wait for the uploads to it at the end of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.checkpoint import remote_store, store
from wfm_ds.errors import StorageError
from wfm_ds.runs import layout
from wfm_ds.runs.layout import CHECKPOINTS, FETCHED, RESULT_FILE
from wfm_ds.runs.mirror import Mirror
from wfm_ds.runs.output_folder import RunStart, claim_folder, clear_run, lock_folder, open_output_folder
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.filesystem import is_remote

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe

log = logging.getLogger(__name__)

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCopies:
    """The files of a run that are missing in S3 when the run ends. Written to result.json."""

    address: str
    missing: list[str]  # names in the run folder that are missing or outdated in the storage
    reason: str  # last error; empty if uploads only stalled

    def missing_message(self, folder: Path) -> str:
        names = ", ".join(self.missing[:NUM_SHOWN])
        more = f" and {len(self.missing) - NUM_SHOWN} more" if len(self.missing) > NUM_SHOWN else ""
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.address} is incomplete{why}: {names}{more} exist only in {folder}; run the same command again to "
            "copy them"
        )


def require_writable_storage(recipe: Recipe) -> None:
    """Raise StorageError if checkpoint.storage is set but cannot be written."""
    if recipe.checkpoint.storage is not None:
        transfer.require_writable(recipe.checkpoint.storage)


def open_mirror(recipe: Recipe, world: World) -> Mirror | None:
    """Create a Mirror on rank 0, without starting it. Returns None on other ranks and without checkpoint.storage."""
    settings = recipe.checkpoint
    if settings.storage is None or not world.is_main:
        return None
    return Mirror(recipe.run.output_dir, settings.storage, keep=settings.keep)


def open_run_folder(
    recipe: Recipe, world: World, mirror: Mirror | None, start: RunStart, *, overwrite: bool
) -> RunStart:
    """Prepare the locked output folder and download the starting checkpoint if it is in S3. All ranks must call this.

    Returns a copy of `start` with the local path of the checkpoint. overwrite: remove the existing run first. Raises
    UserError if the folder or the checkpoint cannot be prepared.
    """

    def prepare_folder() -> None:
        if overwrite:
            clear_run(recipe.run.output_dir)
            if mirror is not None:
                mirror.clear()
        claim_folder(recipe.run.output_dir)
        if start.is_restart and mirror is not None:
            mirror.fetch_metrics()

    world.run_checked(prepare_folder, on="main")
    start = fetch_start_checkpoint(recipe, world, mirror, start)
    world.run_checked(lambda: open_output_folder(recipe, start), on="main")
    return start


def fetch_start_checkpoint(recipe: Recipe, world: World, mirror: Mirror | None, start: RunStart) -> RunStart:
    """Download the checkpoint of `start` if it is in S3. Returns a copy of `start` with the checkpoint's local path.

    All ranks must call this. Raises UserError on all ranks if the download fails.
    """
    address, folder = start.checkpoint, recipe.run.output_dir
    if address is None or not is_remote(address):
        return start

    def fetch_checkpoint() -> str:
        if address.startswith(f"{recipe.checkpoint.storage}/"):
            assert mirror is not None
            return str(mirror.fetch_checkpoint(address))
        checkpoint = remote_store.read_checkpoint(address)
        if checkpoint is None:
            raise StorageError(f"run.resume: {address} was just removed")
        return str(remote_store.fetch_checkpoint(checkpoint, folder / FETCHED / f"step_{checkpoint.step}").path)

    return dataclasses.replace(start, checkpoint=world.broadcast(world.run_without_timeout(fetch_checkpoint)))


def discard_fetched_checkpoint(recipe: Recipe, world: World) -> None:
    """Remove a downloaded checkpoint that belongs to another run. Call this after all ranks have loaded it."""
    if world.is_main:
        shutil.rmtree(recipe.run.output_dir / FETCHED, ignore_errors=True)


def finish_copies(recipe: Recipe, world: World, mirror: Mirror | None) -> StorageCopies | None:
    """Wait for the uploads to S3 and return which files are missing there. All ranks must call this.

    Returns None if checkpoint.storage is not set. All ranks get the same result.
    """
    settings, root = recipe.checkpoint, recipe.run.output_dir / CHECKPOINTS
    if settings.storage is None:
        return None

    def wait_for_mirror() -> list[str]:
        assert mirror is not None
        missing = mirror.finish(settings.storage_timeout_s)
        newest = store.find_newest(root)
        if newest is not None:  # older checkpoints may have been kept until they were uploaded
            store.prune_checkpoints(
                root, newest=newest.step, keep=settings.keep, protected_steps=mirror.list_unverified_steps()
            )
        return missing

    missing = world.broadcast(world.run_without_timeout(wait_for_mirror))
    reason = world.broadcast(mirror.failure if mirror is not None and missing else "")
    copies = StorageCopies(address=settings.storage, missing=missing, reason=reason)
    if missing:
        log.error("%s", copies.missing_message(recipe.run.output_dir))
    return copies


def send_missing_copies(recipe: Recipe, world: World, done: int) -> StorageCopies | None:
    """Upload the missing files of a finished run to S3. done: the run's last step. All ranks must call this.

    Does nothing if the folder is not on this machine or if S3 has a newer state of the run. Raises UserError if S3
    fails, or if the folder or result.json cannot be read.
    """
    folder = recipe.run.output_dir
    if recipe.checkpoint.storage is None or not world.broadcast((folder / RESULT_FILE).exists()):
        return None
    with contextlib.ExitStack() as stack:
        world.run_checked(lambda: stack.enter_context(lock_folder(folder)), on="main")
        mirror = open_mirror(recipe, world)
        if world.broadcast(
            world.run_checked(lambda: mirror is not None and _is_folder_outdated(folder, mirror, done), on="main")
        ):
            return None
        world.run_checked(lambda: mirror.start() if mirror is not None else None, on="main")
        copies = finish_copies(recipe, world, mirror)
        if mirror is not None and copies is not None:
            _write_copies(folder, copies)
            copies = send_result(mirror, copies)
    return copies


def _write_copies(folder: Path, copies: StorageCopies) -> None:
    result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")) | {"storage": dataclasses.asdict(copies)}
    atomic.write_text(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def _is_folder_outdated(folder: Path, mirror: Mirror, done: int) -> bool:
    newer = mirror.newer_step()
    if newer is None and layout.read_folder_contents(folder).finished_step == done:
        return False
    last = done if newer is None else max(done, newer)
    log.info("%s is ahead of this folder, at step %d: nothing is copied from %s", mirror.address, last, folder)
    return True


def send_result(mirror: Mirror, copies: StorageCopies) -> StorageCopies:
    """Upload result.json if S3 has all other files. If that fails, update `storage` in it. Returns new `copies`."""
    if copies.missing:
        return copies
    try:
        mirror.send_result()
    except (StorageError, OSError) as error:
        log.error(
            "%s: only %s is missing in %s; run the same command again to copy it", error, RESULT_FILE, copies.address
        )
        copies = dataclasses.replace(copies, missing=[RESULT_FILE], reason=str(error))
        _write_copies(mirror.folder, copies)
    return copies
