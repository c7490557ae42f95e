"""Locate vision-language models: a local folder, a tiny model, or a repository `owner/name` of the Hub."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RemoteEntryNotFoundError

from wfm_ds.errors import ModelError
from wfm_ds.models import hub
from wfm_ds.models.registry import TINY, cached_tiny

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FILES = ("*.json", "model*.safetensors", "*.txt", "*.jinja", "*.model")  # in the top folder


def locate(path: str, revision: str | None = None) -> Path:
    """Return the folder of a model; at least config.json is available.

    revision: branch, tag or commit on the Hub. Raises ModelError if there is no such model.
    """
    if hub.is_id(path):
        with hub.explained(path, revision), hub.bars_on_terminals():
            try:
                return Path(hf_hub_download(path, CONFIG, revision=revision)).parent
            except RemoteEntryNotFoundError:
                raise ModelError(f"{path} has no {CONFIG}: name a repository in transformers' format") from None
    if revision is not None:
        raise ModelError(f"model.revision {revision} needs a repository of the Hub, but {path} is not one: remove it")
    if path.startswith(TINY):
        return cached_tiny(path.removeprefix(TINY))
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG}; model.path must be the folder of a vision-language model, owner/name on the "
            "Hub, or tiny:qwen25vl"
        )
    return folder


def resolve(path: str, revision: str | None = None) -> Path:
    """Return the folder of a complete model. Downloads missing files from the Hub. Raises ModelError."""
    folder = locate(path, revision)
    if not hub.is_id(path) or is_complete(path, folder):
        return folder
    with hub.explained(path, folder.name), hub.bars_on_terminals():
        matches = snapshot_download(path, revision=folder.name, allow_patterns=list(FILES), dry_run=True)
        files = [file for file in matches if "/" not in file.filename]
        hub.require_space(path, [file for file in files if file.will_download])
        with hub.telling(path, files):
            snapshot_download(path, revision=folder.name, allow_patterns=[file.filename for file in files])
    return folder


def is_complete(repo: str, folder: Path) -> bool:
    """Return whether all files of a snapshot exist, by the cached file list or, without one, by its weight files."""
    try:
        names = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return all((folder / name).is_file() for name in weights_of(folder)) and any(folder.glob("tokenizer*"))
    needed = [Path(name) for name in names if "/" not in name and any(Path(name).match(form) for form in FILES)]
    return all((folder / name).is_file() for name in needed)


def weights_of(folder: Path) -> set[str]:
    """Return the names of a model's weight files."""
    if not (folder / INDEX).is_file():
        return {"model.safetensors"}
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values())
