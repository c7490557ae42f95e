"""The part of all ranks in `checkpoint.storage`: a run may begin from there, and ends when its copies are there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.checkpoint import remote, store
from wfm_ds.errors import StorageError
from wfm_ds.run import layout
from wfm_ds.run.folder import Start, claim, clear_run, locked, open_output
from wfm_ds.run.layout import CHECKPOINTS, FETCHED, RESULT
from wfm_ds.run.mirror import Mirror
from wfm_ds.storage import atomic, transfer
from wfm_ds.storage.filesystem import is_remote

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe

log = logging.getLogger(__name__)

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The state of a run's copies at its end, for result.json."""

    address: str
    missing: list[str]  # names in the run's folder that the storage does not have as they are
    reason: str  # what it last answered; empty if it just took nothing

    def sentence(self, folder: Path) -> str:
        """Return the message for the user if something is missing."""
        names = ", ".join(self.missing[:NUM_SHOWN])
        more = f" and {len(self.missing) - NUM_SHOWN} more" if len(self.missing) > NUM_SHOWN else ""
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.address} does not have all of this run{why}: {names}{more} are in {folder} alone; start the same "
            "command again to copy them"
        )


def require_storage(recipe: Recipe) -> None:
    """Raise StorageError if checkpoint.storage cannot be written."""
    if recipe.checkpoint.storage is not None:
        transfer.require_writable(recipe.checkpoint.storage)


def open_mirror(recipe: Recipe, world: World) -> Mirror | None:
    """Return the mirror of rank 0, not started yet; None on other ranks and without checkpoint.storage."""
    keep = recipe.checkpoint
    if keep.storage is None or not world.is_main:
        return None
    return Mirror(recipe.run.output_dir, keep.storage, keep=keep.keep)


def opened(recipe: Recipe, world: World, mirror: Mirror | None, start: Start, *, overwrite: bool) -> Start:
    """Make the locked folder ready for this start, and return it with its checkpoint on this machine; every rank calls
    it. With `overwrite` the run that is there goes first. Raises UserError."""

    def take_over() -> None:
        if overwrite:
            clear_run(recipe.run.output_dir)
            if mirror is not None:
                mirror.clear()
        claim(recipe.run.output_dir)
        if start.again and mirror is not None:
            mirror.fetch_metrics()

    world.checked(take_over, on="main")
    start = fetched(recipe, world, mirror, start)
    world.checked(lambda: open_output(recipe, start), on="main")
    return start


def fetched(recipe: Recipe, world: World, mirror: Mirror | None, start: Start) -> Start:
    """Return the start with its checkpoint on this machine; every rank calls it. Raises StorageError."""
    address, folder = start.checkpoint, recipe.run.output_dir
    if address is None or not is_remote(address):
        return start

    def fetch() -> str:
        if address.startswith(f"{recipe.checkpoint.storage}/"):
            assert mirror is not None
            return str(mirror.fetch(address))
        found = remote.read(address)
        if found is None:
            raise StorageError(f"run.resume: {address} has been removed a moment ago")
        return str(remote.fetch(found, folder / FETCHED / f"step_{found.step}").path)

    return dataclasses.replace(start, checkpoint=world.broadcast(world.patiently(fetch)))


def discard_fetched(recipe: Recipe, world: World) -> None:
    """Remove another run's checkpoint once all ranks have loaded it."""
    if world.is_main:
        shutil.rmtree(recipe.run.output_dir / FETCHED, ignore_errors=True)


def finish(recipe: Recipe, world: World, mirror: Mirror | None) -> Copies | None:
    """Wait for the copies; every rank calls it and gets the same answer, None without checkpoint.storage."""
    keep, root = recipe.checkpoint, recipe.run.output_dir / CHECKPOINTS
    if keep.storage is None:
        return None

    def wait() -> list[str]:
        assert mirror is not None
        missing = mirror.finish(keep.storage_timeout_s)
        newest = store.newest(root)
        if newest is not None:  # older ones may have waited for their copies
            store.prune(root, newest=newest.step, keep=keep.keep, spared=mirror.unverified())
        return missing

    missing = world.broadcast(world.patiently(wait))
    reason = world.broadcast(mirror.failure if mirror is not None and missing else "")
    copies = Copies(address=keep.storage, missing=missing, reason=reason)
    if missing:
        log.error("%s", copies.sentence(recipe.run.output_dir))
    return copies


def send_rest(recipe: Recipe, world: World, done: int) -> Copies | None:
    """Send what the storage did not take of a run that has finished with step `done`, if its folder is here and the
    storage is not ahead of it. Every rank calls it. Raises StorageError and RecipeError."""
    folder = recipe.run.output_dir
    if recipe.checkpoint.storage is None or not world.broadcast((folder / RESULT).exists()):
        return None
    with contextlib.ExitStack() as held:
        world.checked(lambda: held.enter_context(locked(folder)), on="main")
        mirror = open_mirror(recipe, world)
        if world.broadcast(world.checked(lambda: mirror is not None and _is_behind(folder, mirror, done), on="main")):
            return None
        world.checked(lambda: mirror.start() if mirror is not None else None, on="main")
        copies = finish(recipe, world, mirror)
        if mirror is not None and copies is not None:
            _write_copies(folder, copies)
            sent = send_result(mirror, copies)
            if sent != copies:
                _write_copies(folder, sent)
            copies = sent
    return copies


def _write_copies(folder: Path, copies: Copies) -> None:
    result = json.loads((folder / RESULT).read_text(encoding="utf-8")) | {"storage": dataclasses.asdict(copies)}
    atomic.write_text(folder / RESULT, json.dumps(result, indent=2) + "\n")


def _is_behind(folder: Path, mirror: Mirror, done: int) -> bool:
    """Return whether another machine took the run further than this folder tells. Raises StorageError and
    RecipeError."""
    newer = mirror.newer()
    if newer is None and layout.in_folder(folder).done == done:
        return False
    last = done if newer is None else max(done, newer)
    log.info("%s is ahead of this folder, with step %d: nothing is copied from %s", mirror.address, last, folder)
    return True


def send_result(mirror: Mirror, copies: Copies) -> Copies:
    """Send result.json, the last of a run's files, if the storage took the others; return the state of the copies."""
    if copies.missing:
        return copies
    try:
        mirror.send_result()
    except (StorageError, OSError) as error:
        log.error("%s: %s lacks %s alone; start the same command again to copy it", error, copies.address, RESULT)
        return dataclasses.replace(copies, missing=[RESULT], reason=str(error))
    return copies
