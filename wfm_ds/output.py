"""The output folder: what a run leaves there, whose it is, and where a run that is given it begins."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfm_ds import atomic, recipe_file
from wfm_ds.checkpoint import store
from wfm_ds.derived import derive
from wfm_ds.ds_config import find_config
from wfm_ds.errors import RecipeError
from wfm_ds.monitor import cut_metrics
from wfm_ds.recipe import Recipe

log = logging.getLogger(__name__)

RUN_FILES = ("recipe.yaml", "metrics.jsonl", "result.json")
CHECKPOINTS = "checkpoints"
REWARD = "reward"  # the service's log, which a run that failed before its first step leaves
POLICY = "policy"  # weights for the workers of an async run, while it runs
ROLLOUT = "rollout"  # where these workers find the run, and the logs of those that it starts, which stay too
RUN_FOLDERS = ("tensorboard", "samples", "safetensors", CHECKPOINTS, "logs", REWARD, POLICY, ROLLOUT)
LOCK = ".lock"
ELSEWHERE = "set run.output_dir to another folder, or pass --overwrite to replace that run"

# What a continued run may change: how long it is, where it is, what it shows and keeps, and who scores.
MAY_CHANGE = (
    *("run.steps", "run.output_dir", "run.resume", "logging.", "validation.", "checkpoint."),
    # How the work is cut over ranks: sums in another order, the same numbers but for their last bits.
    *("engine.deepspeed", "engine.micro_batch_size", "engine.gradient_accumulation", "engine.max_forward_batch"),
    "engine.guard",
    *("reward.spawn", "reward.endpoint", "reward.timeout_s", "reward.start_timeout_s"),
    *("rollout.spawn", "rollout.devices", "rollout.bind", "rollout.in_flight"),
    *("rollout.lost_after_s", "rollout.timeout_s"),
)
# Which images are held out decides which are trained on.
MAY_NOT_CHANGE = ("validation.path", "validation.holdout")
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: at its first step, after a checkpoint, or nowhere because it is finished."""

    checkpoint: str | None = None  # the folder to continue from
    step: int = 0  # the last one done
    metrics_bytes: int = 0  # of the output folder's metrics.jsonl that belong to these steps
    finished: bool = False


def find_start(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> Start:
    """Decide by recipe.run.resume and what the folder holds, which with `overwrite` is about to be cleared; creates and
    changes nothing.

    Raises RecipeError when the folder cannot be written, holds a run that is not to be continued or cannot be (of
    another recipe, of another world size, without a complete checkpoint) or folders of somebody else under the names
    of a run's, or when run.resume names no checkpoint.
    """
    folder, resume = recipe.run.output_dir, recipe.run.resume
    present = [name for name in RUN_FILES if (folder / name).exists()]
    if overwrite:
        require_foreign(recipe)
        require_inputs_elsewhere(recipe)
        present = []
    if not present:
        require_writable(folder)
        if not overwrite:
            require_own_names_free(folder)
        return Start() if resume in ("auto", "never") else named_start(recipe, world_size)
    if resume == "never":
        raise RecipeError(f"run.output_dir {folder} holds a run already ({', '.join(present)}): {ELSEWHERE}")
    require_foreign(recipe)
    found, done = store.newest(folder / CHECKPOINTS), finished_step(folder)
    if found is None and done is None:
        raise RecipeError(
            f"run.output_dir {folder} holds a run already ({', '.join(present)}), without a complete checkpoint to "
            f"continue from: {ELSEWHERE}"
        )
    require_same_recipe(recipe, (found.path if found else folder) / "recipe.yaml")
    if done is not None and done >= recipe.run.steps:
        return Start(step=done, finished=True)
    if found is None:
        raise RecipeError(
            f"run.output_dir {folder} holds a run that finished with step {done} and kept no checkpoint to continue "
            f"from (checkpoint.every was 0): {ELSEWHERE}"
        )
    require_same_batch(found, recipe, world_size)
    return Start(checkpoint=str(found.path), step=found.step, metrics_bytes=found.facts["metrics_bytes"])


def named_start(recipe: Recipe, world_size: int) -> Start:
    """A new folder's run that begins where another one's checkpoint ends."""
    path = Path(recipe.run.resume).expanduser()
    found = store.read(path)
    if found is None:
        raise RecipeError(
            f"run.resume: {path} is no complete checkpoint; give auto, never or a folder checkpoints/step_N of a run"
        )
    require_same_recipe(recipe, path / "recipe.yaml")
    require_same_batch(found, recipe, world_size)
    return Start(checkpoint=str(path), step=found.step)


def require_own_names_free(folder: Path) -> None:
    """A run writes into these folders, and removes them if it fails before its first step."""
    taken = [name for name in RUN_FOLDERS if name not in (REWARD, ROLLOUT) and (folder / name).exists()]
    if taken:
        raise RecipeError(
            f"run.output_dir {folder} holds {', '.join(taken)} and no run that these belong to: set run.output_dir to "
            "another folder, or pass --overwrite to remove them"
        )


def require_foreign(recipe: Recipe) -> None:
    """run.resume must not name a checkpoint of the very folder: a run goes on from its newest one."""
    path, folder = Path(recipe.run.resume).expanduser(), recipe.run.output_dir
    if recipe.run.resume not in ("auto", "never") and path.resolve().is_relative_to(folder.resolve()):
        raise RecipeError(
            f"run.resume {path} is a checkpoint of run.output_dir itself, which continues from its newest one: "
            "leave run.resume out, or set run.output_dir to a new folder to begin there from this checkpoint"
        )


def require_inputs_elsewhere(recipe: Recipe) -> None:
    """--overwrite must not delete what the run is about to read."""
    folder = recipe.run.output_dir.resolve()
    inputs: list[tuple[str, str | Path | None]] = [
        ("model.path", Path(recipe.model.path).expanduser()),
        ("engine.deepspeed", find_config(recipe.engine.deepspeed)),
        *(("data.path", path) for path in recipe.data.shards),
        ("data.cache_dir", recipe.data.cache_dir),
        ("validation.path", recipe.validation.path),
        ("validation.prompts", recipe.validation.prompts),
    ]
    for key, path in inputs:
        if path is not None and Path(path).resolve().is_relative_to(folder):
            raise RecipeError(f"{key} {path} lies in run.output_dir, which --overwrite clears: move one of them")


def require_same_recipe(recipe: Recipe, path: Path) -> None:
    if not path.exists():
        raise RecipeError(f"{path} is missing, so nobody can tell whether that run can be continued: {ELSEWHERE}")
    other = recipe_file.load(path)
    differing = differences(other, recipe)
    if differing:
        more = f" and {len(differing) - NUM_SHOWN} more" if len(differing) > NUM_SHOWN else ""
        raise RecipeError(
            f"{path} is of another recipe ({'; '.join(differing[:NUM_SHOWN])}{more}), so that run cannot be "
            f"continued: take these changes back, or {ELSEWHERE}"
        )


def differences(there: Recipe, here: Recipe) -> list[str]:
    """`key: OLD there, NEW here` for each key whose change would make it another run."""
    old, new = flat(there.model_dump(mode="json")), flat(here.model_dump(mode="json"))
    return [
        f"{key}: {old.get(key, 'nothing')} there, {new.get(key, 'nothing')} here"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and (key in MAY_NOT_CHANGE or not key.startswith(MAY_CHANGE))
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def require_same_batch(found: store.Checkpoint, recipe: Recipe, world_size: int) -> None:
    """Other ranks may continue a run, but not with another global batch: it decides which samples come next. In SFT of
    several experts the number of micro-batches decides which of them trains when."""
    derived = derive(recipe, world_size)
    here, there = derived.samples_per_step, found.facts["samples_per_step"]
    if here != there:
        raise RecipeError(
            f"{found.path} was written by {found.world_size} ranks with {there} samples a step; {world_size} ranks of "
            f"this recipe make {here}: set engine.micro_batch_size and engine.gradient_accumulation so that they make "
            f"{there}"
        )
    micros = found.facts.get("accumulation")
    if not recipe.is_rl and found.facts.get("num_experts", 1) > 1 and micros != derived.accumulation:
        raise RecipeError(
            f"{found.path} is of a model with several experts, which took turns in {micros} micro-batches of each "
            f"optimizer step; this recipe makes {derived.accumulation}: set engine.gradient_accumulation to {micros}, "
            f"and engine.micro_batch_size or the number of ranks so that a step has {there} samples"
        )


def finished_step(folder: Path) -> int | None:
    """The last step of the run there if it has finished, by its result.json."""
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return int(result["step"]) if result["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not what a run writes ({error}): {ELSEWHERE}") from error


def require_writable(folder: Path) -> None:
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RecipeError(f"run.output_dir {folder} cannot be created: {existing} is not a writable folder")


def open_output(recipe: Recipe, start: Start) -> None:
    """Cut what the folder holds back to `start`, and put the resolved recipe there."""
    folder = recipe.run.output_dir
    (folder / "result.json").unlink(missing_ok=True)  # it will be told anew how the run ends
    cut_metrics(folder / "metrics.jsonl", start.metrics_bytes)
    atomic.write_text(folder / "recipe.yaml", recipe_file.dump(recipe))


def clear_run(folder: Path, *, keep: Collection[str] = ()) -> None:
    """Remove what a run wrote there, except for `keep`, and nothing else. The caller holds the lock."""
    for name in set(RUN_FOLDERS) - set(keep):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder, which is created; the lock goes when the process does. Raises RecipeError if
    a run is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RecipeError(
                    f"run.output_dir {folder}: a run is going on there; wait until it has ended"
                ) from error
            log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error)
        yield
