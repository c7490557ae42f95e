"""The folder of a vision-language model: of this machine, one of the tiny ones, or of the hub by `owner/name`."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, RemoteEntryNotFoundError

from wfm_ds.errors import ModelError
from wfm_ds.models import hub
from wfm_ds.models.registry import TINY, cached_tiny

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FILES = ("*.json", "model*.safetensors", "*.txt", "*.jinja", "*.model")  # of the top folder, where all of a model is


def locate(path: str, revision: str | None = None) -> Path:
    """The folder of a model, of which config.json is there. `revision`: branch, tag or commit of the hub. ModelError
    where there is none."""
    if hub.is_id(path):
        with hub.explained(path, revision), hub.bars_on_terminals():
            try:
                return Path(hf_hub_download(path, CONFIG, revision=revision)).parent
            except RemoteEntryNotFoundError:
                raise ModelError(f"{path} has no {CONFIG}: name a repository in transformers' format") from None
    if revision is not None:
        raise ModelError(f"model.revision {revision} is for a repository of the hub, and {path} is none: remove it")
    if path.startswith(TINY):
        return cached_tiny(path.removeprefix(TINY))
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG}; model.path must name the folder of a vision-language model, owner/name of the "
            "hub, or tiny:qwen25vl"
        )
    return folder


def resolve(path: str, revision: str | None = None) -> Path:
    """The folder of a model with all that it is loaded from; files of the hub that its cache lacks are fetched. Raises
    ModelError."""
    folder = locate(path, revision)
    if not hub.is_id(path) or is_complete(path, folder):
        return folder
    with hub.explained(path, folder.name), hub.bars_on_terminals():
        found = snapshot_download(path, revision=folder.name, allow_patterns=list(FILES), dry_run=True)
        files = [file for file in found if "/" not in file.filename]
        hub.require_space(path, [file for file in files if file.will_download])
        with hub.telling(path, files):
            snapshot_download(path, revision=folder.name, allow_patterns=[file.filename for file in files])
    return folder


def is_complete(repo: str, folder: Path) -> bool:
    """Return whether all files of a snapshot are there: by the list that the last download kept, else its weights."""
    try:
        listed = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return all((folder / name).is_file() for name in weights_of(folder)) and any(folder.glob("tokenizer*"))
    wanted = [Path(name) for name in listed if "/" not in name and any(Path(name).match(form) for form in FILES)]
    return all((folder / name).is_file() for name in wanted)


def weights_of(folder: Path) -> set[str]:
    """The names of the files that a model's weights are in."""
    if not (folder / INDEX).is_file():
        return {"model.safetensors"}
    return set(json.loads((folder / INDEX).read_text())["weight_map"].values())
