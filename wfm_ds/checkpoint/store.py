"""Local checkpoint folders. Incomplete folders, e.g. of a run that was killed while it saved, are ignored.

    checkpoints/step_400.tmp/      during writing: the files of all ranks, and rank_00000.ok, rank_00001.ok, ...
    checkpoints/step_400/          name of this folder once all files are on disk; COMPLETE lists their sizes
    checkpoints/LATEST             the name of the newest checkpoint, for people and scripts; wfm_ds does not read it

All ranks must share one file system.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wfm_ds.errors import UserError
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import open_regular, read_regular

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World

log = logging.getLogger(__name__)

COMPLETE, LATEST = "COMPLETE", "LATEST"
TEMPORARY_SUFFIX = ".tmp"  # suffix of a folder that is being written
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint folder. All of its files exist and have the recorded sizes."""

    path: Path
    step: int
    world_size: int
    metadata: Mapping[str, Any]  # additional data in COMPLETE


class CheckpointSave:
    """Writes a checkpoint in one thread per rank. All ranks must call the constructor and `commit`."""

    def __init__(
        self,
        root: Path,
        step: int,
        world: World,
        write: Callable[[Path], Sequence[Path]],
        *,
        metadata: Mapping[str, Any],
        keep: int,
        protected_steps: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Start to write `root/step_<step>`. Raises UserError on all ranks if the folder cannot be created.

        write: called in the thread of each rank with the folder to write to. It returns the files that this rank wrote,
        or raises OSError or UserError, and must not communicate with other ranks.
        metadata: JSON values to store in COMPLETE; only the values of rank 0 are used.
        keep: number of checkpoints to keep, including the new one.
        protected_steps: called on rank 0; returns the steps of additional checkpoints to keep.
        """
        self.root, self.step, self.world, self.metadata = root, step, world, metadata
        self.keep, self.protected_steps = keep, protected_steps
        temporary_folder = self.temporary_folder = root / f"step_{step}{TEMPORARY_SUFFIX}"
        world.run_checked(lambda: _create_folder(temporary_folder), on="main")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write_result = self._thread.submit(_write_share, temporary_folder, world.rank, write)

    def is_share_written(self) -> bool:
        """Return whether this rank has finished writing or failed to write. The result may differ between ranks."""
        return self._write_result.done()

    def commit(self) -> Path:
        """Wait for all ranks, mark the checkpoint as complete, and remove old checkpoints. All ranks must call this.

        Returns the path of the checkpoint. If writing failed on any rank, raises UserError on all ranks and keeps the
        older checkpoints.
        """
        world, temporary_folder = self.world, self.temporary_folder
        try:
            world.run_checked(self._write_result.result)
            facts = self.metadata
            world.run_checked(lambda: _complete_folder(temporary_folder, self.step, world.size, facts), on="main")
        except UserError:
            if world.is_main:
                shutil.rmtree(temporary_folder, ignore_errors=True)  # may have filled the disk
            raise
        finally:
            self._thread.shutdown()
        if world.is_main:
            prune_checkpoints(self.root, newest=self.step, keep=self.keep, protected_steps=self.protected_steps())
        return self.root / f"step_{self.step}"


@contextlib.contextmanager
def _translate_write_errors(making: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{making.with_suffix('')}: the checkpoint could not be written ({error}); earlier ones are "
            "intact: free space or repair the folder, then start the same command again"
        ) from error


def _create_folder(making: Path) -> None:
    with _translate_write_errors(making):
        if making.exists():  # left by a killed run
            shutil.rmtree(making)
        making.mkdir(parents=True)
        for entry in making.parent.iterdir():  # also left by killed runs, at other steps
            if entry != making and entry.suffix == TEMPORARY_SUFFIX and STEP_FOLDER.fullmatch(entry.stem):
                _remove_folder(entry)


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:  # only a warning: the folder wastes disk space, but complete checkpoints are intact
        log.warning("%s could not be removed (%s)", folder, error)


def _write_share(making: Path, rank: int, write: Callable[[Path], Sequence[Path]]) -> None:
    with _translate_write_errors(making):
        files = write(making)
        for path in files:
            atomic.sync_to_disk(path)
        for folder in {path.parent for path in files}:
            atomic.sync_to_disk(folder)
        sizes = {path.relative_to(making).as_posix(): path.stat().st_size for path in files}
        atomic.write_text(making / rank_marker_name(rank), json.dumps(sizes))


def _complete_folder(making: Path, step: int, world_size: int, facts: Mapping[str, Any]) -> None:
    with _translate_write_errors(making):
        files: dict[str, int] = {}
        for rank in range(world_size):
            files |= json.loads((making / rank_marker_name(rank)).read_text(encoding="utf-8"))
        changed = [name for name, size in files.items() if (making / name).stat().st_size != size]
        if changed:
            raise OSError(f"files changed their size after they were written: {', '.join(changed)}")
        complete = {"step": step, "world_size": world_size, "facts": dict(facts), "files": files}
        atomic.write_text(making / COMPLETE, json.dumps(complete, indent=1) + "\n")
        final = making.with_suffix("")
        if final.exists():  # damaged, because the run would otherwise have resumed from it
            shutil.rmtree(final)
        making.rename(final)
        atomic.sync_to_disk(final.parent)
        atomic.write_text(final.parent / LATEST, final.name + "\n")


def rank_marker_name(rank: int) -> str:
    return f"rank_{rank:05d}.ok"


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint in this folder, or None if it is incomplete."""
    result = _examine_folder(path)
    return result if isinstance(result, Checkpoint) else None


def find_flaw(path: Path) -> str | None:
    """Return the reason why this folder is not a complete checkpoint, or None if the checkpoint is complete."""
    result = _examine_folder(path)
    return result if isinstance(result, str) else None


def _examine_folder(path: Path) -> Checkpoint | str:
    try:
        marker = json.loads(read_regular(path / COMPLETE))
        checkpoint = Checkpoint(path, int(marker["step"]), int(marker["world_size"]), dict(marker["facts"]))
        sizes = dict(marker["files"])
    except OSError as error:
        return f"{COMPLETE} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return f"{COMPLETE} is damaged"
    for name, size in sizes.items():
        try:
            with open_regular(path / name) as file:
                actual = os.fstat(file.fileno()).st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except ValueError:  # a null character in the name
            return f"{COMPLETE} is damaged"
        if actual != size:
            return f"{name} has {actual} bytes instead of {size}"
    return checkpoint


def find_newest(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in `root`, or None. Logs a warning for each newer incomplete checkpoint."""
    for step in sorted(list_steps(root), reverse=True):
        checkpoint = read_checkpoint(root / f"step_{step}")
        if checkpoint is not None:
            return checkpoint
        log.warning("%s is skipped: %s", root / f"step_{step}", find_flaw(root / f"step_{step}"))
    return None


def find_flaws(root: Path) -> list[str]:
    """Return a description of each incomplete checkpoint in `root`."""
    folder_flaws = ((f"step_{step}", find_flaw(root / f"step_{step}")) for step in sorted(list_steps(root)))
    return [f"{name}: {reason}" for name, reason in folder_flaws if reason is not None]


def list_steps(root: Path) -> list[int]:
    """Return the steps for which `root` has a checkpoint folder, including incomplete checkpoints."""
    if not root.is_dir():
        return []
    return [int(match[1]) for entry in root.iterdir() if (match := STEP_FOLDER.fullmatch(entry.name))]


def steps_to_keep(steps: Collection[int], *, newest: int, keep: int) -> set[int]:
    """Return the `keep` highest steps among the steps up to `newest`."""
    return set(sorted((step for step in steps if step <= newest), reverse=True)[:keep])


def prune_checkpoints(root: Path, *, newest: int, keep: int, protected_steps: Collection[int] = ()) -> None:
    """Remove old checkpoints. Keeps the protected steps and the last `keep` checkpoints up to step `newest`.

    Folders of later steps are removed too: they are damaged, because the run did not resume from them.
    """
    all_steps = set(list_steps(root))
    protected = {step for step in protected_steps if step <= newest}
    for step in all_steps - steps_to_keep(all_steps, newest=newest, keep=keep) - protected:
        _remove_folder(root / f"step_{step}")
