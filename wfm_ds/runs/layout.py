"""Names of the files and folders in a run's folder and in its S3 storage. These names are a stable interface."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from wfm_ds.checkpoint import remote_store, store
from wfm_ds.checkpoint.remote_store import RemoteCheckpoint
from wfm_ds.checkpoint.store import Checkpoint
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage import transfer
from wfm_ds.storage.filesystem import is_remote

RECIPE_FILE, METRICS_FILE, RESULT_FILE = "recipe.yaml", "metrics.jsonl", "result.json"
RUN_FILES = (RECIPE_FILE, METRICS_FILE, RESULT_FILE)
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
EXPORTS = "safetensors"
REWARD = "reward"  # log of the reward service, kept if a run fails before its first step
FETCHED = "fetched"  # checkpoint downloaded from another run's storage, until it is loaded
POLICY = "policy"  # weights for the workers of an active async run
ROLLOUT = "rollout"  # addresses for rollout workers, and logs of spawned workers (kept like REWARD)
TRACKERS = "trackers"  # files of wandb, mlflow, trackio and swanlab
EARLIER = "earlier"  # metrics of attempts without a checkpoint, numbered from 1
PAGE, PAGE_FOLDER = "index.html", "page"  # the run page; a folder that has only the page is not a run
RUN_FOLDERS = (
    *(TENSORBOARD, "samples", EXPORTS, CHECKPOINTS, "logs", REWARD, FETCHED, POLICY, ROLLOUT, EARLIER),
    PAGE_FOLDER,
    TRACKERS,
)
RUN_NAMES = (*RUN_FILES, PAGE, *RUN_FOLDERS)
BAD_JSON = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # JSON of another structure
RECORD_FILE = ".wfm_run.json"  # lists the names that a run has written here and --overwrite may remove


@dataclass(frozen=True, slots=True)
class RunContents:
    key: str  # recipe key and value, for messages
    location: str  # folder or address
    files: tuple[str, ...]  # existing RUN_FILES; empty: no run
    unrecorded: tuple[str, ...]  # existing RUN_NAMES that the record file does not list: possibly not written by a run
    checkpoint: Checkpoint | RemoteCheckpoint | None  # newest complete checkpoint
    damaged: tuple[str, ...]  # why each of the other checkpoints is incomplete
    finished_step: int | None  # last step of a finished run

    def newest_recipe(self) -> tuple[str, Recipe | None]:
        """Return (path, recipe) of the newest checkpoint, or of the run if there is no checkpoint."""
        return read_run_recipe(self.location if self.checkpoint is None else str(self.checkpoint.path))


def read_folder_contents(folder: Path) -> RunContents:
    """Read a run's folder. Raises RecipeError if the folder cannot be read or its result.json is invalid."""
    try:
        names = set(os.listdir(folder)) if folder.exists() else set[str]()
        files = tuple(name for name in RUN_FILES if name in names)
        newest = store.find_newest(folder / CHECKPOINTS) if files else None
        result = folder / RESULT_FILE
        text = result.read_text(encoding="utf-8") if RESULT_FILE in files else None
        damaged = tuple(store.find_flaws(folder / CHECKPOINTS)) if files else ()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"run.output_dir {folder} cannot be read ({error}): set another folder") from error
    done = None if text is None else parse_finished_step(text, str(result))
    listed = read_folder_record(folder)
    if not files and store.list_steps(folder / CHECKPOINTS):
        listed -= {CHECKPOINTS}  # these checkpoints are of an unknown run, and a new run would remove them
    unrecorded = select_unrecorded(names, listed)
    return RunContents(f"run.output_dir {folder}", str(folder), files, unrecorded, newest, damaged, done)


def read_storage_contents(address: str) -> RunContents:
    """Read a run's S3 storage. Raises StorageError if S3 fails, and RecipeError if result.json is invalid."""
    names = {name.partition("/")[0] for name in transfer.list_objects(address)}
    files = tuple(name for name in RUN_FILES if name in names)
    newest = remote_store.find_newest(f"{address}/{CHECKPOINTS}") if files else None
    result = f"{address}/{RESULT_FILE}"
    done = parse_finished_step(transfer.read_text(result), result) if RESULT_FILE in files else None
    damaged = tuple(remote_store.find_flaws(f"{address}/{CHECKPOINTS}")) if files and newest is None else ()
    unrecorded = select_unrecorded(names, read_storage_record(address))
    return RunContents(f"checkpoint.storage {address}", address, files, unrecorded, newest, damaged, done)


def list_unrecorded_files(folder: Path) -> tuple[str, ...]:
    return select_unrecorded(os.listdir(folder) if folder.exists() else (), read_folder_record(folder))


def list_unrecorded_objects(address: str) -> tuple[str, ...]:
    names = {name.partition("/")[0] for name in transfer.list_objects(address)}
    return select_unrecorded(names, read_storage_record(address))


def select_unrecorded(names: Collection[str], listed: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in RUN_NAMES if name in names and name not in listed)


def read_folder_record(folder: Path) -> frozenset[str]:
    """Return the names that the folder's record file lists, or no names if the file is missing or invalid."""
    try:
        return parse_record((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return frozenset()


def read_storage_record(address: str) -> frozenset[str]:
    """Return the names that the record file in S3 lists. Raises StorageError if S3 fails."""
    try:
        return parse_record(transfer.read_text(f"{address}/{RECORD_FILE}"))
    except FileNotFoundError:
        return frozenset()


def parse_record(text: str) -> frozenset[str]:
    try:
        listed = json.loads(text)["wrote"]
        return frozenset(listed).intersection(RUN_NAMES)
    except BAD_JSON:
        return frozenset()


def format_record(names: Collection[str]) -> str:
    return json.dumps({"wrote": sorted(names)}) + "\n"


def read_run_recipe(place: str) -> tuple[str, Recipe | None]:
    """Return (path, content) of recipe.yaml in a folder or at an s3:// address.

    The content is None if the file is missing.

    Raises RecipeError if the file is invalid and StorageError if S3 cannot be read.
    """
    if not is_remote(place):
        path = Path(place) / RECIPE_FILE
        return str(path), recipe_file.load_stored_recipe(path) if path.exists() else None
    address = f"{place}/{RECIPE_FILE}"
    try:
        text = transfer.read_text(address)
    except FileNotFoundError:
        return address, None
    with tempfile.TemporaryDirectory(prefix="wfm-") as folder:
        path = Path(folder) / RECIPE_FILE
        path.write_text(text, encoding="utf-8")
        return address, recipe_file.load_stored_recipe(path)


def parse_finished_step(text: str, place: str) -> int | None:
    """Return the last step from result.json, or None if the run is unfinished. Raises RecipeError if it is invalid."""
    try:
        result = json.loads(text)
        return int(result["step"]) if result["status"] == "finished" else None
    except BAD_JSON as error:
        raise RecipeError(
            f"{place} was not written by a run ({error}): set run.output_dir or checkpoint.storage to another "
            "location, or pass --overwrite to replace that run"
        ) from error
