"""Checks of run.output_dir and other folders before a run writes to them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.deepspeed import find_deepspeed_config
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tiny import TINY_PREFIX
from wfm_ds.storage.filesystem import is_remote, is_repo_id, shorten_path

PROJECT_FILES = (".git", "pyproject.toml", "setup.py")  # a folder with one of these contains source code


def require_usable_folder(folder: Path) -> None:
    """Raise RecipeError if the folder cannot be created or contains source code."""
    require_writable_folder(folder, "run.output_dir")
    project_files = [name for name in PROJECT_FILES if os.path.lexists(folder / name)]
    if project_files:
        raise RecipeError(
            f"run.output_dir {folder} is a project folder (it contains {project_files[0]}), and a run could replace "
            "its files: set a separate folder, for example outputs/my_run"
        )


def require_writable_folder(folder: Path, key: str) -> None:
    """Raise RecipeError if the folder `key` of the recipe cannot be created or written. Creates nothing."""
    existing = find_existing_parent(folder, key)
    try:  # permissions do not tell whether the disk is full or read-only
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RecipeError(
            f"{key} {folder} cannot be created: {existing} is not a writable folder ({error.strerror})"
        ) from error


def find_existing_parent(folder: Path, key: str) -> Path:
    """Return the folder or its nearest existing parent. Raises RecipeError for invalid paths and broken links."""
    for path in (folder, *folder.absolute().parents):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise RecipeError(
                    f"{key} {folder}: {path} is a link to {os.readlink(path)}, which does not exist: create "
                    "that folder or remove the link"
                ) from None
            continue
        except (OSError, ValueError) as error:  # too long, a link to itself, no permission
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RecipeError(f"{key} {shorten_path(folder)}: {reason}: set another folder") from error
        return path
    raise RecipeError(f"{key} {folder}: none of its parents exists: set another folder")


def require_separate_inputs(recipe: Recipe) -> None:
    """Raise RecipeError if --overwrite would delete files that the run needs as input."""
    folder, storage = recipe.run.output_dir.resolve(), recipe.checkpoint.storage
    is_folder = not recipe.model.path.startswith(TINY_PREFIX) and not is_repo_id(recipe.model.path)
    model = Path(recipe.model.path).expanduser() if is_folder else None
    inputs: list[tuple[str, str | Path | None]] = [
        ("model.path", model),
        ("lora.init_from", None if recipe.lora is None else recipe.lora.init_from),
        *(("algorithm teacher", teacher.weights) for teacher in recipe.algorithm.list_lora_teachers().values()),
        ("engine.deepspeed", find_deepspeed_config(recipe.engine.deepspeed)),
        *(("data.path", path) for path in recipe.data.shard_patterns),
        *(("data.sets", path) for one, _ in recipe.data.set_recipes().values() for path in one.shard_patterns),
        ("data.cache_dir", recipe.data.cache_dir),
        ("validation.path", recipe.validation.path),
        ("validation.prompts", recipe.validation.prompts),
    ]
    for key, path in inputs:
        if path is None:
            continue
        if is_remote(str(path)):
            owner = "checkpoint.storage" if storage is not None and str(path).startswith(f"{storage}/") else None
        else:
            owner = "run.output_dir" if is_inside_folder(Path(path), folder) else None
        if owner is not None:
            raise RecipeError(f"{key} {path} is inside {owner}, which --overwrite clears: move one of them")


def is_inside_folder(path: Path, folder: Path) -> bool:
    """Return whether `path` is inside the folder after links are resolved. Returns False for circular links."""
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):
        return False
