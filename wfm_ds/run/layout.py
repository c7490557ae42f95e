"""What is left of a run, in its folder and in its storage: the names, which are a contract, and what they tell."""

from __future__ import annotations

import json
import tempfile
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
CHECKPOINTS = "checkpoints"
REWARD = "reward"  # the services' log, which a run that failed before its first step leaves
FETCHED = "fetched"  # a checkpoint of another run's storage, until this run has taken it up
POLICY = "policy"  # weights for the workers of an async run, while it runs
ROLLOUT = "rollout"  # where these workers find the run, and the logs of those that it starts, which stay too
RUN_FOLDERS = ("tensorboard", "samples", "safetensors", CHECKPOINTS, "logs", REWARD, FETCHED, POLICY, ROLLOUT)


@dataclass(frozen=True, slots=True)
class Traces:
    """What a folder or a storage holds of a run."""

    key: str  # the recipe's, with its value, for messages
    place: str  # folder or address
    files: tuple[str, ...]  # of RUN_FILES; without any there is no run
    folders: tuple[str, ...]  # of RUN_FOLDERS
    checkpoint: Checkpoint | RemoteCheckpoint | None  # the newest complete one
    done: int | None  # the last step of a run that has finished

    def recipe(self) -> tuple[str, Recipe | None]:
        """Where the newest checkpoint's recipe is to be found, or that of the run if it has none, and what it says;
        None if it is missing. Raises RecipeError and StorageError."""
        return read_recipe(self.place if self.checkpoint is None else str(self.checkpoint.path))


def in_folder(folder: Path) -> Traces:
    """Raises RecipeError for a result.json that no run wrote."""
    files = tuple(name for name in RUN_FILES if (folder / name).exists())
    folders = tuple(name for name in RUN_FOLDERS if (folder / name).exists())
    found = store.newest(folder / CHECKPOINTS) if files else None
    result = folder / RESULT
    done = finished_step(result.read_text(encoding="utf-8"), str(result)) if RESULT in files else None
    return Traces(f"run.output_dir {folder}", str(folder), files, folders, found, done)


def in_storage(address: str) -> Traces:
    """Raises StorageError, and RecipeError for a result.json that no run wrote."""
    names = {name.partition("/")[0] for name in transfer.listing(address)}
    files = tuple(name for name in RUN_FILES if name in names)
    folders = tuple(name for name in RUN_FOLDERS if name in names)
    found = remote.newest(f"{address}/{CHECKPOINTS}") if files else None
    result = f"{address}/{RESULT}"
    done = finished_step(transfer.read_text(result), result) if RESULT in files else None
    return Traces(f"checkpoint.storage {address}", address, files, folders, found, done)


def read_recipe(place: str) -> tuple[str, Recipe | None]:
    """The recipe.yaml of a folder or an address; None if it has none. Raises RecipeError and StorageError."""
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
    """The last step of the run if it has finished, by its result.json. Raises RecipeError."""
    try:
        result = json.loads(text)
        return int(result["step"]) if result["status"] == "finished" else None
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{place} is not what a run writes ({error}): set run.output_dir or checkpoint.storage to another place, "
            "or pass --overwrite to replace that run"
        ) from error
