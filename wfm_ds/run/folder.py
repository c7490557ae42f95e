"""The output folder of a run: the lock, the decision where a run begins, and what --overwrite may remove."""

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

# What a continued run may change: how long it is, where it is, what it shows and keeps, and who scores.
MAY_CHANGE = (
    *("run.steps", "run.output_dir", "run.resume", "logging.", "validation.", "checkpoint."),
    # How the work is cut over ranks: sums in another order, the same numbers but for their last bits.
    *("engine.deepspeed", "engine.micro_batch_size", "engine.gradient_accumulation", "engine.max_forward_batch"),
    *("engine.sequence_parallel", "engine.guard", "engine.deterministic", "engine.compile"),
    *("model.gradient_checkpointing", "model.attention"),
    *("reward.spawn", "reward.endpoint", "reward.keys", "reward.timeout_s", "reward.start_timeout_s"),
    *("rollout.spawn", "rollout.devices", "rollout.bind", "rollout.keys", "rollout.policy_folder", "rollout.in_flight"),
    *("rollout.lost_after_s", "rollout.timeout_s"),
)
# Which images are held out decides which are trained on.
MAY_NOT_CHANGE = ("validation.path", "validation.holdout")
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of a run: its first step, a checkpoint, or none because it has finished."""

    checkpoint: str | None = None  # the folder or s3:// address to continue from
    step: int = 0  # the last one done
    metrics_bytes: int = 0  # of the run's metrics.jsonl that belong to these steps
    finished: bool = False
    again: bool = False  # an earlier attempt at this run ended before its first checkpoint

    @property
    def is_new(self) -> bool:
        """True if nothing of this run was there before."""
        return self.checkpoint is None and not self.again


def find_start(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Start:
    """Decide by recipe.run.resume and what the folder and the storage hold, which with `overwrite` are about to be
    cleared; creates and changes nothing.

    Raises RecipeError when the folder cannot be written, when folder or storage hold a run that is not to be continued
    or cannot be (of another recipe, of another world size, with damaged checkpoints alone) or folders of somebody else
    under the names of a run's, or when run.resume names no checkpoint. StorageError when the storage does not answer.
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
    held = [place for place in places if place.files]
    if not held:
        for place in places:
            require_own_names_free(place)
        return first_start(recipe, world_size)
    there = f"{held[0].key} holds a run already ({', '.join(held[0].files)})"
    if resume == "never":
        raise RecipeError(f"{there}: {way_out(held[0])}")
    require_foreign(recipe)
    # A folder's own checkpoint stands before an equal one in the storage.
    found = max((place.checkpoint for place in held if place.checkpoint), key=lambda one: one.step, default=None)
    done = max((place.done for place in held if place.done is not None), default=None)
    for place in held:
        require_same_recipe(recipe, *place.recipe(), way_out(place))
    if done is not None and done >= recipe.run.steps:
        return Start(step=done, finished=True)
    if found is None:
        require_nothing_to_lose(held, done)
        return dataclasses.replace(first_start(recipe, world_size), again=True)
    require_same_batch(found, recipe, world_size)
    return Start(checkpoint=str(found.path), step=found.step, metrics_bytes=found.facts["metrics_bytes"])


def way_out(place: Contents) -> str:
    return STORED_ELSEWHERE if is_remote(place.place) else ELSEWHERE


def require_nothing_to_lose(held: Sequence[Contents], done: int | None) -> None:
    """Raise RecipeError if a run without a complete checkpoint must not begin again: it has finished, or a damaged
    checkpoint could be repaired."""
    if done is not None:
        raise RecipeError(
            f"{held[0].key} holds a run that finished with step {done} and kept no checkpoint to continue from "
            f"(checkpoint.every was 0): {way_out(held[0])}"
        )
    for place in held:
        if place.damaged:
            raise RecipeError(
                f"{place.key} holds a run whose checkpoints are all damaged ({'; '.join(place.damaged[:NUM_SHOWN])}): "
                f"repair one, or remove their folders to begin again from step 0, or {way_out(place)}"
            )


def first_start(recipe: Recipe, world_size: int) -> Start:
    """Return the start of a new run, which may be the checkpoint of another one."""
    resume = recipe.run.resume
    if resume in ("auto", "never"):
        return Start()
    path = resume.rstrip("/") if is_remote(resume) else str(Path(resume).expanduser())
    found = remote.read(path) if is_remote(resume) else store.read(Path(path))
    if found is None:
        raise RecipeError(
            f"run.resume: {path} is no complete checkpoint; give auto, never or checkpoints/step_N of a run"
        )
    require_same_recipe(recipe, *layout.read_recipe(path), ELSEWHERE)
    require_same_batch(found, recipe, world_size)
    return Start(checkpoint=path, step=found.step)


def require_own_names_free(place: Contents) -> None:
    """Raise RecipeError if a run's names are somebody else's there: a run would write into them and may remove them."""
    if place.unrecorded:
        raise RecipeError(
            f"{place.key} holds {', '.join(place.unrecorded)} and no run that these belong to: "
            f"move them, or set {place.key.partition(' ')[0]} to another place"
        )


def require_recorded(place: str, unrecorded: Collection[str]) -> None:
    """Raise RecipeError unless a run's own record lists all that --overwrite would delete."""
    if unrecorded:
        raise RecipeError(
            f"{place} holds {', '.join(unrecorded)}, which no record of a run ({RECORD}) lists, so that --overwrite "
            f"does not delete them: remove them yourself, or set {place.partition(' ')[0]} to another place"
        )


def require_foreign(recipe: Recipe) -> None:
    """Raise RecipeError if run.resume names a checkpoint of the run itself, which continues from its newest one."""
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
            f"run.resume {resume} is a checkpoint of {key} itself, which continues from its newest one: leave "
            "run.resume out, or set run.output_dir and checkpoint.storage to new places to begin there from this "
            "checkpoint"
        )


def require_same_recipe(recipe: Recipe, path: str, other: Recipe | None, way_out: str) -> None:
    """Raise RecipeError unless `other`, which stands at `path`, is the recipe of the same run."""
    if other is None:
        raise RecipeError(f"{path} is missing, so nobody can tell whether that run can be continued: {way_out}")
    differing = differences(other, recipe)
    if differing:
        more = f" and {len(differing) - NUM_SHOWN} more" if len(differing) > NUM_SHOWN else ""
        raise RecipeError(
            f"{path} is of another recipe ({'; '.join(differing[:NUM_SHOWN])}{more}), so that run cannot be "
            f"continued: take these changes back, or {way_out}"
        )


def differences(there: Recipe, here: Recipe) -> list[str]:
    """Return `key: OLD there, NEW here` for each key whose change makes another run."""
    old, new = flat(there.model_dump(mode="json")), flat(here.model_dump(mode="json"))
    # With buckets the samples of a micro-batch have one size, which decides in what order samples come.
    decides_order = here.data.buckets is not None and not here.is_rl
    fixed = (*MAY_NOT_CHANGE, *(["engine.micro_batch_size"] if decides_order else []))
    return [
        f"{key}: {old.get(key, 'nothing')} there, {new.get(key, 'nothing')} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in fixed or not key.startswith(MAY_CHANGE))
    ]


def require_same_batch(found: Checkpoint | RemoteCheckpoint, recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError for another global batch than the checkpoint's, which decides which samples come next. In SFT
    of several experts the number of micro-batches decides which of them trains when, and must stay too."""
    derived = derive(recipe, world_size)
    here, there = derived.samples_per_step, found.facts["samples_per_step"]
    if here != there:
        raise RecipeError(
            f"{found.path} was written by {found.world_size} ranks with {there} samples a step; {world_size} ranks of "
            f"this recipe make {here}: set engine.micro_batch_size, engine.gradient_accumulation and "
            f"engine.sequence_parallel so that they make {there}"
        )
    micros = found.facts.get("accumulation")
    if not recipe.is_rl and found.facts.get("num_experts", 1) > 1 and micros != derived.accumulation:
        raise RecipeError(
            f"{found.path} is of a model with several experts, which took turns in {micros} micro-batches of each "
            f"optimizer step; this recipe makes {derived.accumulation}: set engine.gradient_accumulation to {micros}, "
            f"and engine.micro_batch_size or the number of ranks so that a step has {there} samples"
        )


def claim(folder: Path) -> None:
    """Record that what stands under a run's names in this folder is a run's, before the first of it is written. The
    caller holds the lock, and `find_start` found nobody else's there."""
    with first_write(folder):
        atomic.write_text(folder / RECORD, layout.record_of(layout.NAMES))


def open_output(recipe: Recipe, start: Start) -> None:
    """Put the resolved recipe into the folder, and cut what else it holds back to `start`."""
    folder = recipe.run.output_dir
    with first_write(folder):
        # First, and never without: whoever finds the rest must be able to tell whose it is.
        atomic.write_text(folder / RECIPE, recipe_file.dump(recipe))
        if start.again:
            set_aside(folder)
        (folder / RESULT).unlink(missing_ok=True)  # it will be told anew how the run ends
        cut_metrics(folder / METRICS, start.metrics_bytes)


def set_aside(folder: Path) -> None:
    """Move the metrics of an attempt that ended before its first checkpoint to `earlier/N`, if it has any."""
    metrics = folder / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        return
    root = folder / EARLIER
    root.mkdir(exist_ok=True)
    number = 1 + max((int(entry.name) for entry in root.iterdir() if entry.name.isdecimal()), default=0)
    aside = root / str(number)
    aside.mkdir()
    for name in (TENSORBOARD, RESULT, METRICS):  # the metrics last: while they are there, the rest is moved, too
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    log.info("begins again from step 0: %s has the metrics of the attempt before, which saved no checkpoint", aside)


def clear_run(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Remove what a run's record says it wrote there, except for `keep`, and nothing else. The caller holds the
    lock."""
    listed = layout.recorded(folder)
    for name in listed.difference(keep).intersection(RUN_FOLDERS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in listed.difference(keep).intersection(RUN_FILES):
        (folder / name).unlink(missing_ok=True)
    page = folder / layout.PAGE
    if layout.PAGE in listed and page.is_file() and is_ours(page):  # a run that went on here may have found another
        page.unlink()
    left = [name for name in listed if (folder / name).exists()]
    if left:
        atomic.write_text(folder / RECORD, layout.record_of(left))
    else:
        (folder / RECORD).unlink(missing_ok=True)


@contextlib.contextmanager
def first_write(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block, of a read-only folder or a full disk, into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.output_dir {folder} cannot be written ({error}): free space there, or name another folder"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder, which is created; the lock goes when the process does. Raises RecipeError if
    a run is there, UserError if it cannot be written."""
    with first_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RecipeError(
                    f"run.output_dir {folder}: a run is going on there; wait until it has ended"
                ) from error
            log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error)
        yield
