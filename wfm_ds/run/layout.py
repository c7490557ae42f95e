"""Layout of a run's folder and of its storage: the names, which are a contract, and their meaning."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from wfm_ds.checkpoint import remote, store
from wfm_ds.checkpoint.remote import RemoteCheckpoint
from wfm_ds.checkpoint.store import Checkpoint
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage import transfer
from wfm_ds.storage.filesystem import is_remote

RECIPE, METRICS, RESULT = "recipe.yaml", "metrics.jsonl", "result.json"
RUN_FILES = (RECIPE, METRICS, RESULT)
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
EXPORTS = "safetensors"
REWARD = "reward"  # the services' log, which a run that failed before its first step leaves
FETCHED = "fetched"  # a checkpoint of another run's storage, until this run has taken it up
POLICY = "policy"  # weights for the workers of an async run, while it runs
ROLLOUT = "rollout"  # where these workers find the run, and the logs of those that it starts, which stay too
TRACKERS = "trackers"  # files of trackers: wandb, mlflow, trackio
EARLIER = "earlier"  # the metrics of attempts that ended before their first checkpoint, numbered from 1
PAGE, PAGE_FOLDER = "index.html", "page"  # for people: a page without the files above is no run
RUN_FOLDERS = (
    *(TENSORBOARD, "samples", EXPORTS, CHECKPOINTS, "logs", REWARD, FETCHED, POLICY, ROLLOUT, EARLIER),
    PAGE_FOLDER,
    TRACKERS,
)
NAMES = (*RUN_FILES, PAGE, *RUN_FOLDERS)
RECORD = ".wfm_run.json"  # which of these names a run here may have written, and --overwrite may remove


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a folder or a storage that belong to a run."""

    key: str  # the recipe's, with its value, for messages
    place: str  # folder or address
    files: tuple[str, ...]  # of RUN_FILES; without any there is no run
    unrecorded: tuple[str, ...]  # a run's names that no record lists: they may be somebody else's
    checkpoint: Checkpoint | RemoteCheckpoint | None  # the newest complete one
    damaged: tuple[str, ...]  # why each of the others is not complete
    done: int | None  # the last step of a run that has finished

    def recipe(self) -> tuple[str, Recipe | None]:
        """Return the path of the newest checkpoint's recipe, or of the run's if it has no checkpoint, and that recipe;
        None if it is missing. Raises RecipeError and StorageError."""
        return read_recipe(self.place if self.checkpoint is None else str(self.checkpoint.path))


def in_folder(folder: Path) -> Contents:
    """Read what a folder holds. Raises RecipeError if it cannot be read, or has a result.json that no run wrote."""
    try:
        names = set(os.listdir(folder)) if folder.exists() else set[str]()
        files = tuple(name for name in RUN_FILES if name in names)
        found = store.newest(folder / CHECKPOINTS) if files else None
        result = folder / RESULT
        text = result.read_text(encoding="utf-8") if RESULT in files else None
        damaged = tuple(store.flaws(folder / CHECKPOINTS)) if files else ()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"run.output_dir {folder} cannot be read ({error}): choose another folder") from error
    done = None if text is None else finished_step(text, str(result))
    listed = recorded(folder)
    if not files and store.steps(folder / CHECKPOINTS):
        listed -= {CHECKPOINTS}  # whose they are is not known, and a new run would remove them
    unrecorded = unrecorded_of(names, listed)
    return Contents(f"run.output_dir {folder}", str(folder), files, unrecorded, found, damaged, done)


def in_storage(address: str) -> Contents:
    """Read what a storage holds. Raises StorageError, and RecipeError for a result.json that no run wrote."""
    names = {name.partition("/")[0] for name in transfer.listing(address)}
    files = tuple(name for name in RUN_FILES if name in names)
    found = remote.newest(f"{address}/{CHECKPOINTS}") if files else None
    result = f"{address}/{RESULT}"
    done = finished_step(transfer.read_text(result), result) if RESULT in files else None
    damaged = tuple(remote.flaws(f"{address}/{CHECKPOINTS}")) if files and found is None else ()
    unrecorded = unrecorded_of(names, recorded_at(address))
    return Contents(f"checkpoint.storage {address}", address, files, unrecorded, found, damaged, done)


def unrecorded_in(folder: Path) -> tuple[str, ...]:
    """Return a run's names in this folder that no record lists."""
    return unrecorded_of(os.listdir(folder) if folder.exists() else (), recorded(folder))


def unrecorded_at(address: str) -> tuple[str, ...]:
    """Return a run's names in this storage that no record lists. Raises StorageError."""
    names = {name.partition("/")[0] for name in transfer.listing(address)}
    return unrecorded_of(names, recorded_at(address))


def unrecorded_of(names: Collection[str], listed: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name in names and name not in listed)


def recorded(folder: Path) -> frozenset[str]:
    """Return the names that the folder's record lists; none if there is no record that can be read."""
    try:
        return parse_record((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return frozenset()


def recorded_at(address: str) -> frozenset[str]:
    """Return the names that the record of a storage lists. Raises StorageError."""
    try:
        return parse_record(transfer.read_text(f"{address}/{RECORD}"))
    except FileNotFoundError:
        return frozenset()


def parse_record(text: str) -> frozenset[str]:
    try:
        listed = json.loads(text)["wrote"]
        return frozenset(listed).intersection(NAMES)
    except (ValueError, KeyError, TypeError):
        return frozenset()


def record_of(names: Collection[str]) -> str:
    """Return the text of a record that lists these names."""
    return json.dumps({"wrote": sorted(names)}) + "\n"


def read_recipe(place: str) -> tuple[str, Recipe | None]:
    """Read the recipe.yaml of a folder or an address; None if it has none. Raises RecipeError and StorageError."""
    if not is_remote(place):
        path = Path(place) / RECIPE
        return str(path), recipe_file.load(path) if path.exists() else None
    address = f"{place}/{RECIPE}"
    try:
        text = transfer.read_text(address)
    except FileNotFoundError:
        return address, None
    with tempfile.TemporaryDirectory(prefix="wfm-") as folder:
        path = Path(folder) / RECIPE
        path.write_text(text, encoding="utf-8")
        return address, recipe_file.load(path)


def finished_step(text: str, place: str) -> int | None:
    """Return the last step of a run that its result.json calls finished, else None. Raises RecipeError."""
    try:
        result = json.loads(text)
        return int(result["step"]) if result["status"] == "finished" else None
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{place} is not what a run writes ({error}): set run.output_dir or checkpoint.storage to another place, "
            "or pass --overwrite to replace that run"
        ) from error
