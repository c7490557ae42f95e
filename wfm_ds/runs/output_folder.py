"""Output folder of a run: locking it, finding where the run starts, and clearing it with --overwrite."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds.checkpoint import remote_store, store
from wfm_ds.checkpoint.remote_store import RemoteCheckpoint
from wfm_ds.checkpoint.store import Checkpoint
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.monitoring.monitor import truncate_metrics
from wfm_ds.monitoring.run_page import is_run_page
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import flatten_keys
from wfm_ds.runs import layout
from wfm_ds.runs.layout import (
    EARLIER,
    METRICS_FILE,
    RECIPE_FILE,
    RECORD_FILE,
    RESULT_FILE,
    RUN_FILES,
    RUN_FOLDERS,
    TENSORBOARD,
    RunContents,
)
from wfm_ds.runs.output_checks import is_inside_folder, require_separate_inputs, require_usable_folder
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import is_remote

log = logging.getLogger(__name__)

LOCK = ".lock"
CHANGE_FOLDER_HINT = "set run.output_dir to another folder, or pass --overwrite to replace that run"
CHANGE_STORAGE_HINT = "set checkpoint.storage to another address, or pass --overwrite to replace that run"

# Keys that a continued run may change: length, location, logging, checkpoints and services.
MAY_CHANGE = (
    *("run.steps", "run.output_dir", "run.resume", "logging.", "validation.", "checkpoint."),
    # Partitioning of the work over ranks: only changes the order of sums.
    *("engine.deepspeed", "engine.micro_batch_size", "engine.gradient_accumulation", "engine.max_forward_batch"),
    *("engine.sequence_parallel", "engine.guard", "engine.deterministic", "engine.compile"),
    "engine.fused_norms",
    *("model.gradient_checkpointing", "model.attention"),
    *("reward.spawn", "reward.endpoint", "reward.keys", "reward.timeout_s", "reward.start_timeout_s"),
    *("rollout.spawn", "rollout.devices", "rollout.bind", "rollout.keys", "rollout.policy_folder", "rollout.in_flight"),
    *("rollout.worker_timeout_s", "rollout.timeout_s"),
)
# Exceptions: these keys determine which samples are used for training.
MAY_NOT_CHANGE = ("validation.path", "validation.episodes", "validation.holdout")
# Keys of each reward that affect only the reward service.
REWARD_MAY_CHANGE = {"reward": {"functions": {"__all__": {"workers", "max_batch", "device"}}}}
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Starting point of a run: step 0, a checkpoint, or none because the run has finished."""

    checkpoint: str | None = None  # folder or s3:// address to continue from
    step: int = 0  # last completed step
    metrics_bytes: int = 0  # size of metrics.jsonl up to this step
    is_finished: bool = False
    is_restart: bool = False  # an earlier attempt ended before its first checkpoint

    @property
    def is_new(self) -> bool:
        return self.checkpoint is None and not self.is_restart


def find_run_start(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> RunStart:
    """Find out where the run starts, from run.resume and the contents of its folder and storage. Writes nothing.

    overwrite: treat folder and storage as empty, because they will be cleared. Raises RecipeError if the folder cannot
    be written, if run.resume is not a checkpoint, or if folder or storage contain a run that cannot continue (different
    recipe or global batch, all checkpoints damaged) or files with reserved names that do not belong to a run. Raises
    StorageError if the storage does not respond.
    """
    folder, resume, storage = recipe.run.output_dir, recipe.run.resume, recipe.checkpoint.storage
    require_usable_folder(folder)
    if overwrite:
        require_other_run(recipe)
        require_separate_inputs(recipe)
        require_recorded_files(f"run.output_dir {folder}", layout.list_unrecorded_files(folder))
        if storage is not None:
            require_recorded_files(f"checkpoint.storage {storage}", layout.list_unrecorded_objects(storage))
        return new_run_start(recipe, world_size)
    places = [layout.read_folder_contents(folder)]
    if storage is not None:
        places.append(layout.read_storage_contents(storage))
    occupied = [place for place in places if place.files]
    if not occupied:
        for place in places:
            require_unused_names(place)
        return new_run_start(recipe, world_size)
    if resume == "never":
        first = occupied[0]
        raise RecipeError(f"{first.key} already contains a run ({', '.join(first.files)}): {suggest_fix(first)}")
    require_other_run(recipe)
    # If folder and storage have the same newest step, the local checkpoint is used.
    newest = max((place.checkpoint for place in occupied if place.checkpoint), key=lambda one: one.step, default=None)
    done = max((place.finished_step for place in occupied if place.finished_step is not None), default=None)
    for place in occupied:
        require_same_recipe(recipe, *place.newest_recipe(), suggest_fix(place))
    if done is not None and done >= recipe.run.steps:
        return RunStart(step=done, is_finished=True)
    if newest is None:
        require_restartable(occupied, done)
        return dataclasses.replace(new_run_start(recipe, world_size), is_restart=True)
    require_same_batch_size(newest, recipe, world_size)
    return RunStart(checkpoint=str(newest.path), step=newest.step, metrics_bytes=newest.metadata["metrics_bytes"])


def suggest_fix(place: RunContents) -> str:
    return CHANGE_STORAGE_HINT if is_remote(place.location) else CHANGE_FOLDER_HINT


def require_restartable(held: Sequence[RunContents], done: int | None) -> None:
    """Raise RecipeError if the run finished without a checkpoint or has only damaged checkpoints.

    done: last step of the finished run, or None if it is not finished.
    """
    if done is not None:
        raise RecipeError(
            f"{held[0].key} contains a run that finished at step {done} without a checkpoint (checkpoint.every was 0): "
            f"{suggest_fix(held[0])}"
        )
    for place in held:
        if place.damaged:
            raise RecipeError(
                f"{place.key} contains a run with only damaged checkpoints ({'; '.join(place.damaged[:NUM_SHOWN])}): "
                f"repair one, or remove their folders to restart from step 0, or {suggest_fix(place)}"
            )


def new_run_start(recipe: Recipe, world_size: int) -> RunStart:
    """Return the RunStart of a new run: step 0, or another run's checkpoint in run.resume.

    Raises RecipeError if run.resume is not a complete checkpoint or does not fit the recipe.
    """
    resume = recipe.run.resume
    if resume in ("auto", "never"):
        return RunStart()
    path = resume.rstrip("/") if is_remote(resume) else str(Path(resume).expanduser())
    checkpoint = remote_store.read_checkpoint(path) if is_remote(resume) else store.read_checkpoint(Path(path))
    if checkpoint is None:
        raise RecipeError(f"run.resume: {path} is not a complete checkpoint: set auto, never or checkpoints/step_N")
    require_same_recipe(recipe, *layout.read_run_recipe(path), CHANGE_FOLDER_HINT)
    require_same_batch_size(checkpoint, recipe, world_size)
    return RunStart(checkpoint=path, step=checkpoint.step)


def require_unused_names(place: RunContents) -> None:
    """Raise RecipeError if folder or storage contain files with reserved names that do not belong to a run."""
    if place.unrecorded:
        raise RecipeError(
            f"{place.key} contains {', '.join(place.unrecorded)}, which belong to no run: move them, or set "
            f"{place.key.partition(' ')[0]} to another location"
        )


def require_recorded_files(place: str, unrecorded: Collection[str]) -> None:
    """Raise RecipeError if `unrecorded` is not empty, because --overwrite does not delete these files.

    place: recipe key and value of the location. unrecorded: files with reserved names that the record file does not
    list.
    """
    if unrecorded:
        raise RecipeError(
            f"{place} contains {', '.join(unrecorded)}, which {RECORD_FILE} does not list, so --overwrite does not "
            f"delete them: remove them yourself, or set {place.partition(' ')[0]} to another location"
        )


def require_other_run(recipe: Recipe) -> None:
    """Raise RecipeError if run.resume is a checkpoint of this run itself."""
    resume, folder, storage = recipe.run.resume, recipe.run.output_dir, recipe.checkpoint.storage
    if resume in ("auto", "never"):
        return
    if is_remote(resume):
        key, own = "checkpoint.storage", storage is not None and resume.startswith(f"{storage}/")
    else:
        path = Path(resume).expanduser()
        key, own = "run.output_dir", is_inside_folder(path, folder.resolve())
    if own:
        raise RecipeError(
            f"run.resume {resume} is a checkpoint of {key} itself, which continues from its newest checkpoint: remove "
            "run.resume, or set run.output_dir and checkpoint.storage to new locations to start from this checkpoint"
        )


def require_same_recipe(recipe: Recipe, path: str, other: Recipe | None, hint: str) -> None:
    """Raise RecipeError if the recipe `other` is missing or belongs to a different run.

    path: the file of `other`. hint: instruction for the user, added to the message.
    """
    if other is None:
        raise RecipeError(f"{path} is missing, so that run cannot be continued: {hint}")
    differing = list_recipe_changes(other, recipe)
    if differing:
        more = f" and {len(differing) - NUM_SHOWN} more" if len(differing) > NUM_SHOWN else ""
        raise RecipeError(
            f"{path} is a different recipe ({'; '.join(differing[:NUM_SHOWN])}{more}), so that run cannot be "
            f"continued: undo these changes, or {hint}"
        )


def list_recipe_changes(there: Recipe, here: Recipe) -> list[str]:
    """Return `key: OLD there, NEW here` for each difference that prevents the run from continuing."""
    old, new = (flatten_keys(r.model_dump(mode="json", exclude=REWARD_MAY_CHANGE)) for r in (there, here))
    # With buckets, a micro-batch has images of one size, so engine.micro_batch_size affects the order of samples.
    decides_order = here.data.buckets is not None and not here.is_rl
    fixed = (*MAY_NOT_CHANGE, *(["engine.micro_batch_size"] if decides_order else []))
    return [
        f"{key}: {_format_key(old, key)} there, {_format_key(new, key)} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in fixed or not key.startswith(MAY_CHANGE))
    ]


def _format_key(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "nothing"
    return values[key] if isinstance(values[key], str) else json.dumps(values[key])


def require_same_batch_size(found: Checkpoint | RemoteCheckpoint, recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the recipe's global batch size differs from the checkpoint's.

    In SFT of a two-expert model, the number of micro-batches must be equal too, because it determines when each expert
    trains.
    """
    derived = derive_run_sizes(recipe, world_size)
    here, there = derived.samples_per_step, found.metadata["samples_per_step"]
    if here != there:
        raise RecipeError(
            f"{found.path} was written by {found.world_size} ranks with {there} samples per step; {world_size} ranks "
            f"with this recipe have {here}: change engine.micro_batch_size, engine.gradient_accumulation or "
            f"engine.sequence_parallel to get {there}"
        )
    micros = found.metadata.get("accumulation")
    if not recipe.is_rl and found.metadata.get("num_experts", 1) > 1 and micros != derived.accumulation:
        raise RecipeError(
            f"{found.path} has several experts, trained in {micros} micro-batches per optimizer step; this recipe has "
            f"{derived.accumulation}: set engine.gradient_accumulation to {micros}, and engine.micro_batch_size or the "
            f"number of ranks to get {there} samples per step"
        )


def claim_folder(folder: Path) -> None:
    """Write the record file, which lists the names in this folder that belong to a run.

    Call this after the folder is locked and find_run_start has found no foreign files, and before other files are
    written.
    """
    with explain_write_errors(folder):
        atomic.write_text(folder / RECORD_FILE, layout.format_record(layout.RUN_NAMES))


def open_output_folder(recipe: Recipe, start: RunStart) -> None:
    """Write the resolved recipe to the output folder, and truncate the folder's metrics to the starting step."""
    folder = recipe.run.output_dir
    with explain_write_errors(folder):
        atomic.remove_part_files(folder.glob(".*"))
        for name in RUN_FOLDERS:
            atomic.remove_part_files((folder / name).rglob(".*"))
        # The recipe is written first: it identifies the other files.
        atomic.write_text(folder / RECIPE_FILE, recipe_file.dump_recipe(recipe))
        if start.is_restart:
            archive_attempt(folder)
        (folder / RESULT_FILE).unlink(missing_ok=True)  # written again at the end of the run
        truncate_metrics(folder / METRICS_FILE, start.metrics_bytes)


def archive_attempt(folder: Path) -> None:
    """Move the metrics of an attempt that ended before its first checkpoint to the subfolder `earlier/N`."""
    metrics = folder / METRICS_FILE
    if not metrics.exists() or metrics.stat().st_size == 0:
        return
    root = folder / EARLIER
    root.mkdir(exist_ok=True)
    number = 1 + max((int(entry.name) for entry in root.iterdir() if entry.name.isdecimal()), default=0)
    archive = root / str(number)
    archive.mkdir()
    for name in (TENSORBOARD, RESULT_FILE, METRICS_FILE):  # metrics last: if interrupted, the move is repeated
        if (folder / name).exists():
            (folder / name).rename(archive / name)
    log.info("restarting from step 0; metrics of the earlier attempt without a checkpoint: %s", archive)


def clear_run(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Remove the files that the folder's record file lists, except `keep`. The caller must have locked the folder."""
    listed = layout.read_folder_record(folder)
    for name in listed.difference(keep).intersection(RUN_FOLDERS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in listed.difference(keep).intersection(RUN_FILES):
        (folder / name).unlink(missing_ok=True)
    page = folder / layout.PAGE
    if layout.PAGE in listed and page.is_file() and is_run_page(page):  # else it is a third-party file
        page.unlink()
    remaining = [name for name in listed if (folder / name).exists()]
    if remaining:
        atomic.write_text(folder / RECORD_FILE, layout.format_record(remaining))
    else:
        (folder / RECORD_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError in the block to UserError, for example if the disk is full or the folder is read-only."""
    try:
        yield
    except OSError as error:
        raise UserError(f"run.output_dir {folder} cannot be written ({error}): free space, or set another") from error


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create and lock the folder, so that no other run uses it. The lock is released when the process ends.

    Raises RecipeError if another run has locked the folder, and UserError if the folder cannot be written.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RecipeError(
                    f"run.output_dir {folder}: another run is active there: wait until it has ended"
                ) from error
            log.warning("%s cannot be locked (%s): a second run would not be detected", folder, error)
        yield
