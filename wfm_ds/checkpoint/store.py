"""Checkpoint folders that are complete or absent, whatever kills the run. What is in them is state.py's business.

    checkpoints/step_400.tmp/      while it is written: the files of all ranks, and rank_00000.ok, rank_00001.ok, ...
    checkpoints/step_400/          renamed when all is on disk; COMPLETE lists every file with its size
    checkpoints/LATEST             the name of the newest one, for people and scripts; nothing here reads it

A folder without a COMPLETE that fits its files is no checkpoint: it is passed over, and replaced when its step comes
again; a step_N.tmp that a killed run left goes when the next save begins. All ranks share one file system.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.errors import UserError
from wfm_ds.storage import atomic

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)

COMPLETE, LATEST = "COMPLETE", "LATEST"
MAKING = ".tmp"  # ends the name of a folder that is being written
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files are all there, in the sizes that they were written in."""

    path: Path
    step: int
    world_size: int
    facts: Mapping[str, Any]  # what the writer noted in COMPLETE


class Save:
    """A checkpoint that is being written by a thread of each rank, while training goes on. Every rank calls all."""

    def __init__(
        self,
        root: Path,
        step: int,
        world: World,
        write: Callable[[Path], Sequence[Path]],
        *,
        facts: Mapping[str, Any],
        keep: int,
        spared: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Begin `root/step_<step>`.

        `write(folder)` runs in the thread, on every rank; it must not communicate, and returns the files that this rank
        wrote below the folder; OSError and UserError are errors that it may raise. `facts`: JSON, rank 0's are kept.
        `keep`: how many checkpoints stay, this one included; besides them those steps that `spared()` names, on rank
        0, stay. Raises UserError on all ranks if the folder cannot be made.
        """
        self.root, self.step, self.world, self.facts = root, step, world, facts
        self.keep, self.spared = keep, spared
        making = self.making = root / f"step_{step}{MAKING}"
        world.checked(lambda: _writable(making, lambda: _begin(making)), on="main")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._share = self._thread.submit(_writable, making, lambda: _write_share(making, world.rank, write))

    def share_is_written(self) -> bool:
        """Return whether this rank has written its share, or failed to: a local fact."""
        return self._share.done()

    def commit(self) -> Path:
        """Wait for all shares, mark the checkpoint as complete, prune older ones; returns its path.

        Raises UserError on all ranks if any failed; all older checkpoints are then intact.
        """
        world, making = self.world, self.making
        try:
            world.checked(self._share.result)
            world.checked(
                lambda: _writable(making, lambda: _commit(making, self.step, world.size, self.facts)), on="main"
            )
        except UserError:
            if world.is_main:
                shutil.rmtree(making, ignore_errors=True)  # half a checkpoint may be what fills the disk
            raise
        finally:
            self._thread.shutdown()
        if world.is_main:
            prune(self.root, newest=self.step, keep=self.keep, spared=self.spared())
        return self.root / f"step_{self.step}"


def _writable(making: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        raise UserError(
            f"{making.with_suffix('')}: the checkpoint could not be written ({error}); earlier ones are intact: free "
            "space or repair the folder, then start the same command again"
        ) from error


def _begin(making: Path) -> None:
    if making.exists():  # of a writer that was killed
        shutil.rmtree(making)
    making.mkdir(parents=True)
    for entry in making.parent.iterdir():  # of others, which the next start may have left at another step
        if entry != making and entry.suffix == MAKING and STEP_FOLDER.fullmatch(entry.stem):
            _remove(entry)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:  # what is complete is safe; disk space is not worth a run
        log.warning("%s could not be removed (%s)", folder, error)


def _write_share(making: Path, rank: int, write: Callable[[Path], Sequence[Path]]) -> None:
    """Put this rank's files on disk, and then the list of them."""
    files = write(making)
    for path in files:
        atomic.sync(path)
    for folder in {path.parent for path in files}:
        atomic.sync(folder)
    sizes = {path.relative_to(making).as_posix(): path.stat().st_size for path in files}
    atomic.write_text(making / ok_name(rank), json.dumps(sizes))


def _commit(making: Path, step: int, world_size: int, facts: Mapping[str, Any]) -> None:
    """Check, mark as complete and rename, on rank 0, once every rank has left its list."""
    files: dict[str, int] = {}
    for rank in range(world_size):
        files |= json.loads((making / ok_name(rank)).read_text(encoding="utf-8"))
    torn = [name for name, size in files.items() if (making / name).stat().st_size != size]
    if torn:
        raise OSError(f"files have changed their size since they were written: {', '.join(torn)}")
    complete = {"step": step, "world_size": world_size, "facts": dict(facts), "files": files}
    atomic.write_text(making / COMPLETE, json.dumps(complete, indent=1) + "\n")
    final = making.with_suffix("")
    if final.exists():  # damaged, or it would have been continued from
        shutil.rmtree(final)
    making.rename(final)
    atomic.sync(final.parent)
    atomic.write_text(final.parent / LATEST, final.name + "\n")


def ok_name(rank: int) -> str:
    return f"rank_{rank:05d}.ok"


def read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in this folder; None if it is not complete, for a reason that `flaw` says."""
    found = _examined(path)
    return found if isinstance(found, Checkpoint) else None


def flaw(path: Path) -> str | None:
    """Return why this folder is no complete checkpoint, as a clause; None if it is one."""
    found = _examined(path)
    return found if isinstance(found, str) else None


def _examined(path: Path) -> Checkpoint | str:
    """Return the checkpoint, or why it is none: COMPLETE is missing, or files are, or their sizes differ from what it
    says."""
    try:
        marker = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        found = Checkpoint(path, int(marker["step"]), int(marker["world_size"]), dict(marker["facts"]))
        sizes = dict(marker["files"])
    except OSError as error:
        return f"{COMPLETE} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} is garbled"
    for name, size in sizes.items():
        try:
            there = (path / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
    return found


def newest(root: Path) -> Checkpoint | None:
    """Return the complete checkpoint with the highest step below `root`. What it passes over is logged. Changes
    nothing."""
    for step in sorted(steps(root), reverse=True):
        found = read(root / f"step_{step}")
        if found is not None:
            return found
        log.warning("%s is passed over: %s", root / f"step_{step}", flaw(root / f"step_{step}"))
    return None


def flaws(root: Path) -> list[str]:
    """Say of each checkpoint folder below `root` that is not complete what is wrong with it."""
    found = ((f"step_{step}", flaw(root / f"step_{step}")) for step in sorted(steps(root)))
    return [f"{name}: {why}" for name, why in found if why is not None]


def steps(root: Path) -> list[int]:
    """Return the steps that have a folder, complete or not."""
    if not root.is_dir():
        return []
    return [int(match[1]) for entry in root.iterdir() if (match := STEP_FOLDER.fullmatch(entry.name))]


def kept_steps(known: Collection[int], *, newest: int, keep: int) -> set[int]:
    """Return the `keep` last ones up to `newest`."""
    return set(sorted((step for step in known if step <= newest), reverse=True)[:keep])


def prune(root: Path, *, newest: int, keep: int, spared: Collection[int] = ()) -> None:
    """Remove all but the `keep` last checkpoints up to step `newest` and those spared, and all beyond it, which were
    passed over."""
    known = set(steps(root))
    kept = kept_steps(known, newest=newest, keep=keep) | {step for step in spared if step <= newest}
    for step in known - kept:
        _remove(root / f"step_{step}")
