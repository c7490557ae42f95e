"""Finds the folders of vision-language models on this machine and on the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import DryRunFileInfo, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RemoteEntryNotFoundError

from wfm_ds.errors import ModelError
from wfm_ds.models.assets import hub
from wfm_ds.models.assets.hub_errors import translate_hub_errors
from wfm_ds.models.assets.loading import read_weight_map
from wfm_ds.models.assets.local_folders import CONFIG_FILE, require_language_folder, require_tiny_name
from wfm_ds.models.registry import get_tiny_folder
from wfm_ds.recipe.tiny import TINY_PREFIX
from wfm_ds.storage.filesystem import is_repo_id

INDEX_FILE = "model.safetensors.index.json"
FILE_PATTERNS = ("*.json", "model*.safetensors", "*.txt", "*.jinja", "*.model")  # in the top folder


def locate_language_model(path: str, revision: str | None = None) -> Path:
    """Return the folder of a vision-language model. For a Hub repository, only config.json is downloaded.

    Raises ModelError if the model does not exist.
    """
    if is_repo_id(path):
        with translate_hub_errors(path, revision), hub.hide_bars_without_terminal():
            try:
                return hub.download_first_file(path, CONFIG_FILE, revision)
            except RemoteEntryNotFoundError:
                raise ModelError(f"{path} has no {CONFIG_FILE}: name a repository in transformers' format") from None
    if revision is not None:
        raise ModelError(f"model.revision {revision} needs a repository of the Hub, but {path} is not one: remove it")
    if path.startswith(TINY_PREFIX):
        require_tiny_name(path, is_language_model=True)
        return get_tiny_folder(path.removeprefix(TINY_PREFIX))
    return require_language_folder(path)


def download_language_model(path: str, revision: str | None = None) -> Path:
    """Download the missing files of a vision-language model and return its folder.

    Raises ModelError if the download fails.
    """
    folder = locate_language_model(path, revision)
    if not is_repo_id(path) or is_language_snapshot_complete(path, folder):
        return folder
    hub.download_files(path, folder.name, list_language_files(path, folder.name))
    return folder


def list_language_files(repo: str, revision: str | None) -> list[DryRunFileInfo]:
    """Return the files of a transformers model. Raises ModelError if the Hub cannot be reached or denies access."""
    return [file for file in hub.list_files(repo, revision, FILE_PATTERNS) if "/" not in file.filename]


def is_language_snapshot_complete(repo: str, folder: Path) -> bool:
    """Return whether the snapshot folder has all files of the model.

    If the last download saved no file list, checks only the weight files and the tokenizer.
    """
    try:
        names = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        index = folder / INDEX_FILE
        weights = set(read_weight_map(index).values()) if index.is_file() else {"model.safetensors"}
        return all((folder / name).is_file() for name in weights) and any(folder.glob("tokenizer*"))
    needed = [Path(name) for name in names if "/" not in name and any(Path(name).match(form) for form in FILE_PATTERNS)]
    return all((folder / name).is_file() for name in needed)
