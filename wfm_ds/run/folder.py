"""Output folder of a run: lock, start position of the run, and removal with --overwrite."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wfm_ds.checkpoint import remote, store
from wfm_ds.checkpoint.remote import RemoteCheckpoint
from wfm_ds.checkpoint.store import Checkpoint
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.monitoring.monitor import cut_metrics
from wfm_ds.monitoring.run_page import is_ours
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.derived import derive
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import flat
from wfm_ds.run import layout
from wfm_ds.run.layout import EARLIER, METRICS, RECIPE, RECORD, RESULT, RUN_FILES, RUN_FOLDERS, TENSORBOARD, Contents
from wfm_ds.run.place import is_below, require_inputs_elsewhere, require_usable
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import is_remote

log = logging.getLogger(__name__)

LOCK = ".lock"
ELSEWHERE = "set run.output_dir to another folder, or pass --overwrite to replace that run"
STORED_ELSEWHERE = "set checkpoint.storage to another address, or pass --overwrite to replace that run"

# Keys that a continued run may change: length, location, logging, checkpoints and services.
MAY_CHANGE = (
    *("run.steps", "run.output_dir", "run.resume", "logging.", "validation.", "checkpoint."),
    # Partitioning of the work over ranks: only changes the order of sums.
    *("engine.deepspeed", "engine.micro_batch_size", "engine.gradient_accumulation", "engine.max_forward_batch"),
    *("engine.sequence_parallel", "engine.guard", "engine.deterministic", "engine.compile"),
    *("model.gradient_checkpointing", "model.attention"),
    *("reward.spawn", "reward.endpoint", "reward.keys", "reward.timeout_s", "reward.start_timeout_s"),
    *("rollout.spawn", "rollout.devices", "rollout.bind", "rollout.keys", "rollout.policy_folder", "rollout.in_flight"),
    *("rollout.worker_timeout_s", "rollout.timeout_s"),
)
# They determine the training samples.
MAY_NOT_CHANGE = ("validation.path", "validation.holdout")
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of a run: from step 0, from a checkpoint, or not at all because it has finished."""

    checkpoint: str | None = None  # folder or s3:// address to continue from
    step: int = 0  # last completed step
    metrics_bytes: int = 0  # size of metrics.jsonl up to this step
    finished: bool = False
    again: bool = False  # an earlier attempt ended before its first checkpoint

    @property
    def is_new(self) -> bool:
        """Whether this is the first attempt at this run."""
        return self.checkpoint is None and not self.again


def find_start(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Start:
    """Determine the start from recipe.run.resume and the contents of folder and storage. Changes nothing.

    overwrite: folder and storage will be cleared.
    Raises RecipeError if the folder cannot be written; if folder or storage contain a run that must not or cannot be
    continued (different recipe or global batch, only damaged checkpoints) or third-party files with names of a run's
    files; or if run.resume is not a checkpoint. Raises StorageError if the storage does not reply.
    """
    folder, resume, storage = recipe.run.output_dir, recipe.run.resume, recipe.checkpoint.storage
    require_usable(folder)
    if overwrite:
        require_foreign(recipe)
        require_inputs_elsewhere(recipe)
        require_recorded(f"run.output_dir {folder}", layout.unrecorded_in(folder))
        if storage is not None:
            require_recorded(f"checkpoint.storage {storage}", layout.unrecorded_at(storage))
        return first_start(recipe, world_size)
    places = [layout.in_folder(folder)]
    if storage is not None:
        places.append(layout.in_storage(storage))
    occupied = [place for place in places if place.files]
    if not occupied:
        for place in places:
            require_own_names_free(place)
        return first_start(recipe, world_size)
    if resume == "never":
        first = occupied[0]
        raise RecipeError(f"{first.key} already contains a run ({', '.join(first.files)}): {way_out(first)}")
    require_foreign(recipe)
    # A local checkpoint is preferred to an equal one in the storage.
    newest = max((place.checkpoint for place in occupied if place.checkpoint), key=lambda one: one.step, default=None)
    done = max((place.done for place in occupied if place.done is not None), default=None)
    for place in occupied:
        require_same_recipe(recipe, *place.recipe(), way_out(place))
    if done is not None and done >= recipe.run.steps:
        return Start(step=done, finished=True)
    if newest is None:
        require_nothing_to_lose(occupied, done)
        return dataclasses.replace(first_start(recipe, world_size), again=True)
    require_same_batch(newest, recipe, world_size)
    return Start(checkpoint=str(newest.path), step=newest.step, metrics_bytes=newest.facts["metrics_bytes"])


def way_out(place: Contents) -> str:
    return STORED_ELSEWHERE if is_remote(place.place) else ELSEWHERE


def require_nothing_to_lose(held: Sequence[Contents], done: int | None) -> None:
    """Raise RecipeError if a run without a complete checkpoint must not restart from step 0: it has finished, or a
    damaged checkpoint could be repaired."""
    if done is not None:
        raise RecipeError(
            f"{held[0].key} contains a run that finished at step {done} without a checkpoint (checkpoint.every was 0): "
            f"{way_out(held[0])}"
        )
    for place in held:
        if place.damaged:
            raise RecipeError(
                f"{place.key} contains a run with only damaged checkpoints ({'; '.join(place.damaged[:NUM_SHOWN])}): "
                f"repair one, or remove their folders to restart from step 0, or {way_out(place)}"
            )


def first_start(recipe: Recipe, world_size: int) -> Start:
    """Return the start of a new run: step 0, or a checkpoint of another run."""
    resume = recipe.run.resume
    if resume in ("auto", "never"):
        return Start()
    path = resume.rstrip("/") if is_remote(resume) else str(Path(resume).expanduser())
    checkpoint = remote.read(path) if is_remote(resume) else store.read(Path(path))
    if checkpoint is None:
        raise RecipeError(
            f"run.resume: {path} is not a complete checkpoint: set auto, never or checkpoints/step_N of a run"
        )
    require_same_recipe(recipe, *layout.read_recipe(path), ELSEWHERE)
    require_same_batch(checkpoint, recipe, world_size)
    return Start(checkpoint=path, step=checkpoint.step)


def require_own_names_free(place: Contents) -> None:
    """Raise RecipeError if files that belong to no run have names of a run's files."""
    if place.unrecorded:
        raise RecipeError(
            f"{place.key} contains {', '.join(place.unrecorded)}, which belong to no run: move them, or set "
            f"{place.key.partition(' ')[0]} to another location"
        )


def require_recorded(place: str, unrecorded: Collection[str]) -> None:
    """Raise RecipeError if --overwrite would delete files that no run has recorded as its own."""
    if unrecorded:
        raise RecipeError(
            f"{place} contains {', '.join(unrecorded)}, which {RECORD} does not list, so --overwrite does not delete "
            f"them: remove them yourself, or set {place.partition(' ')[0]} to another location"
        )


def require_foreign(recipe: Recipe) -> None:
    """Raise RecipeError if run.resume is a checkpoint of this run, which continues from its newest one anyway."""
    resume, folder, storage = recipe.run.resume, recipe.run.output_dir, recipe.checkpoint.storage
    if resume in ("auto", "never"):
        return
    if is_remote(resume):
        key, own = "checkpoint.storage", storage is not None and resume.startswith(f"{storage}/")
    else:
        path = Path(resume).expanduser()
        key, own = "run.output_dir", is_below(path, folder.resolve())
    if own:
        raise RecipeError(
            f"run.resume {resume} is a checkpoint of {key} itself, which continues from its newest one: remove "
            "run.resume, or set run.output_dir and checkpoint.storage to new locations to start from this checkpoint"
        )


def require_same_recipe(recipe: Recipe, path: str, other: Recipe | None, way_out: str) -> None:
    """Raise RecipeError unless `other`, read from `path`, describes the same run."""
    if other is None:
        raise RecipeError(f"{path} is missing, so that run cannot be continued: {way_out}")
    differing = differences(other, recipe)
    if differing:
        more = f" and {len(differing) - NUM_SHOWN} more" if len(differing) > NUM_SHOWN else ""
        raise RecipeError(
            f"{path} is a different recipe ({'; '.join(differing[:NUM_SHOWN])}{more}), so that run cannot be "
            f"continued: undo these changes, or {way_out}"
        )


def differences(there: Recipe, here: Recipe) -> list[str]:
    """Return `key: OLD there, NEW here` for each difference that prevents continuing the run."""
    old, new = flat(there.model_dump(mode="json")), flat(here.model_dump(mode="json"))
    # With buckets, all samples of a micro-batch have one size, so its size affects their order.
    decides_order = here.data.buckets is not None and not here.is_rl
    fixed = (*MAY_NOT_CHANGE, *(["engine.micro_batch_size"] if decides_order else []))
    return [
        f"{key}: {old.get(key, 'nothing')} there, {new.get(key, 'nothing')} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in fixed or not key.startswith(MAY_CHANGE))
    ]


def require_same_batch(found: Checkpoint | RemoteCheckpoint, recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError if the global batch differs from the checkpoint's, since it determines the next samples.

    In SFT of several experts the number of micro-batches must also match: it determines which expert trains when.
    """
    derived = derive(recipe, world_size)
    here, there = derived.samples_per_step, found.facts["samples_per_step"]
    if here != there:
        raise RecipeError(
            f"{found.path} was written by {found.world_size} ranks with {there} samples per step; {world_size} ranks "
            f"with this recipe have {here}: change engine.micro_batch_size, engine.gradient_accumulation or "
            f"engine.sequence_parallel to get {there}"
        )
    micros = found.facts.get("accumulation")
    if not recipe.is_rl and found.facts.get("num_experts", 1) > 1 and micros != derived.accumulation:
        raise RecipeError(
            f"{found.path} has several experts, trained in {micros} micro-batches per optimizer step; this recipe has "
            f"{derived.accumulation}: set engine.gradient_accumulation to {micros}, and engine.micro_batch_size or the "
            f"number of ranks to get {there} samples per step"
        )


def claim(folder: Path) -> None:
    """Record that files with a run's names in this folder belong to a run, before the first is written.

    The caller holds the lock, and find_run_start found no third-party files.
    """
    with first_write(folder):
        atomic.write_text(folder / RECORD, layout.record_of(layout.NAMES))


def open_output(recipe: Recipe, start: Start) -> None:
    """Write the resolved recipe to the folder, and truncate its metrics to `start`."""
    folder = recipe.run.output_dir
    with first_write(folder):
        # The recipe is written first: it identifies the other files.
        atomic.write_text(folder / RECIPE, recipe_file.dump(recipe))
        if start.again:
            set_aside(folder)
        (folder / RESULT).unlink(missing_ok=True)  # written again at the end of the run
        cut_metrics(folder / METRICS, start.metrics_bytes)


def set_aside(folder: Path) -> None:
    """Move the metrics of an attempt that ended before its first checkpoint to `earlier/N`, if there are any."""
    metrics = folder / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        return
    root = folder / EARLIER
    root.mkdir(exist_ok=True)
    number = 1 + max((int(entry.name) for entry in root.iterdir() if entry.name.isdecimal()), default=0)
    archive = root / str(number)
    archive.mkdir()
    for name in (TENSORBOARD, RESULT, METRICS):  # metrics last: as long as they exist, the move is repeated
        if (folder / name).exists():
            (folder / name).rename(archive / name)
    log.info("restarting from step 0; metrics of the earlier attempt without a checkpoint: %s", archive)


def clear_run(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Remove the files listed in the folder's record, except `keep`. The caller holds the lock."""
    listed = layout.recorded(folder)
    for name in listed.difference(keep).intersection(RUN_FOLDERS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in listed.difference(keep).intersection(RUN_FILES):
        (folder / name).unlink(missing_ok=True)
    page = folder / layout.PAGE
    if layout.PAGE in listed and page.is_file() and is_ours(page):  # it may be a third-party file
        page.unlink()
    remaining = [name for name in listed if (folder / name).exists()]
    if remaining:
        atomic.write_text(folder / RECORD, layout.record_of(remaining))
    else:
        (folder / RECORD).unlink(missing_ok=True)


@contextlib.contextmanager
def first_write(folder: Path) -> Iterator[None]:
    """Convert an OSError of the block, such as a full disk or read-only folder, to a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.output_dir {folder} cannot be written ({error}): free disk space, or set another folder"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and lock it against other runs. The lock is released when the process ends.

    Raises RecipeError if another run has the lock, UserError if the folder cannot be written.
    """
    with first_write(folder):
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
