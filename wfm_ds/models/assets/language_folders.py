"""Locate vision-language models: a local folder, a tiny model, or a repository `owner/name` of the Hub."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RemoteEntryNotFoundError

from wfm_ds.errors import ModelError
from wfm_ds.models.assets import hub
from wfm_ds.models.registry import TINY_PREFIX, get_tiny_folder

CONFIG_FILE, INDEX_FILE = "config.json", "model.safetensors.index.json"
FILE_PATTERNS = ("*.json", "model*.safetensors", "*.txt", "*.jinja", "*.model")  # in the top folder


def locate_language_model(path: str, revision: str | None = None) -> Path:
    """Return the folder of a vision-language model. From the Hub, only config.json is downloaded.

    Raises ModelError if the model does not exist.
    """
    if hub.is_repo_id(path):
        with hub.translate_hub_errors(path, revision), hub.hide_bars_without_terminal():
            try:
                return Path(hf_hub_download(path, CONFIG_FILE, revision=revision)).parent
            except RemoteEntryNotFoundError:
                raise ModelError(f"{path} has no {CONFIG_FILE}: name a repository in transformers' format") from None
    if revision is not None:
        raise ModelError(f"model.revision {revision} needs a repository of the Hub, but {path} is not one: remove it")
    if path.startswith(TINY_PREFIX):
        return get_tiny_folder(path.removeprefix(TINY_PREFIX))
    folder = Path(path).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG_FILE}; model.path must be the folder of a vision-language model, owner/name "
            "on the "
            "Hub, or tiny:qwen25vl"
        )
    return folder


def download_language_model(path: str, revision: str | None = None) -> Path:
    """Return the folder of a vision-language model after downloading its missing files.

    Raises ModelError if the download fails.
    """
    folder = locate_language_model(path, revision)
    if not hub.is_repo_id(path) or is_language_snapshot_complete(path, folder):
        return folder
    with hub.translate_hub_errors(path, folder.name), hub.hide_bars_without_terminal():
        matches = snapshot_download(path, revision=folder.name, allow_patterns=list(FILE_PATTERNS), dry_run=True)
        files = [file for file in matches if "/" not in file.filename]
        hub.require_disk_space(path, [file for file in files if file.will_download])
        with hub.log_download_progress(path, files):
            snapshot_download(path, revision=folder.name, allow_patterns=[file.filename for file in files])
    return folder


def is_language_snapshot_complete(repo: str, folder: Path) -> bool:
    """Return whether the snapshot folder has all files of the model.

    Uses the file list that the last download saved. If there is no list, only the weight files and the tokenizer are
    checked.
    """
    try:
        names = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return all((folder / name).is_file() for name in weight_file_names(folder)) and any(folder.glob("tokenizer*"))
    needed = [Path(name) for name in names if "/" not in name and any(Path(name).match(form) for form in FILE_PATTERNS)]
    return all((folder / name).is_file() for name in needed)


def weight_file_names(folder: Path) -> set[str]:
    if not (folder / INDEX_FILE).is_file():
        return {"model.safetensors"}
    return set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
