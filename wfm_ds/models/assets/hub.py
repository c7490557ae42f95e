"""Pipelines from the Hugging Face Hub: download `owner/name` to the Hub cache of this machine.

The first download is model_index.json, which shows whether the pipeline is supported and which components it has. The
files of these components follow. Cached files are not downloaded again, and a complete cached commit needs no network.
huggingface_hub reads the token from HF_TOKEN or from `hf auth login`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import DryRunFileInfo, HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    DryRunError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import ModelError
from wfm_ds.models.assets.weight_files import parse_variant

log = logging.getLogger(__name__)

INDEX = "model_index.json"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
INDEX_NAME = re.compile(r".+\.safetensors\.index(?:\.(?P<variant>\w+))?\.json")
HUB_PAGES = ("models", "datasets", "spaces")  # Hub pages, not owners: `models/x` is a local folder
PART_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
WEIGHTS = ".safetensors"
PROGRESS_INTERVAL_S = 30.0
RELEASED_REPOS = {  # supported repositories in diffusers' format, with the branch if it is not main
    "stabilityai/stable-diffusion-3.5-medium": None,
    "stabilityai/stable-diffusion-3.5-large": None,
    "stabilityai/stable-diffusion-3-medium-diffusers": None,
    "black-forest-labs/FLUX.2-dev": None,
    "black-forest-labs/FLUX.2-klein-base-4B": None,
    "black-forest-labs/FLUX.2-klein-base-9B": None,
    "black-forest-labs/FLUX.2-klein-4B": None,
    "black-forest-labs/FLUX.2-klein-9B": None,
    "Qwen/Qwen-Image": None,
    "Qwen/Qwen-Image-2512": None,
    "Tongyi-MAI/Z-Image": None,
    "Tongyi-MAI/Z-Image-Turbo": None,
    "nvidia/Cosmos-Predict2.5-2B": "diffusers/base/post-trained",
    "nvidia/Cosmos3-Edge": None,
    "nvidia/Cosmos3-Nano": None,
    "nvidia/Cosmos3-Super": None,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": None,
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": None,
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": None,
    "Efficient-Large-Model/SANA-WM_bidirectional-diffusers": None,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": None,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": None,
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": None,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": None,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": None,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": None,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": None,
}
COSMOS_CHECKPOINT_SUFFIX = "_ema_bf16.pt"  # file name suffix of the original Cosmos checkpoints


def cosmos_conversion_command(file: str, name: str) -> str:
    """Return the shell command that converts an original Cosmos checkpoint to diffusers.

    file: the checkpoint. name: any name that contains the model size, 2B or 14B.
    """
    size = "14B" if "14B" in name else "2B"
    return (
        f"python convert_cosmos_to_diffusers.py --transformer_type Cosmos-2.5-Predict-Base-{size} "
        f"--transformer_ckpt_path {file} --vae_type wan2.1 --output_path OUT --save_pipeline (a script of diffusers)"
    )


def is_repo_id(path: str) -> bool:
    """Return whether `path` is a Hub repository owner/name and not a local folder."""
    return REPO_ID.fullmatch(path) is not None and path.partition("/")[0] not in HUB_PAGES and not os.path.isdir(path)


def is_commit(revision: str | None) -> bool:
    return revision is not None and COMMIT_HASH.fullmatch(revision) is not None


def download_index(repo: str, revision: str | None) -> Path:
    """Download model_index.json to the Hub cache and return its snapshot folder, which is named after the commit.

    Raises ModelError if the Hub does not have the file, or if it is not cached and there is no network.
    """
    with translate_hub_errors(repo, revision), hide_bars_without_terminal():
        try:
            return Path(hf_hub_download(repo, INDEX, revision=revision)).parent
        except RemoteEntryNotFoundError:
            raise ModelError(
                missing_index_message(repo, revision, HfApi().list_repo_files(repo, revision=revision))
            ) from None


def download_components(repo: str, folder: Path, index: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Download the missing files of a pipeline's components and return the snapshot folder.

    index: content of model_index.json. Raises ModelError like `download_index`, and also if the disk has too little
    space.
    """
    commit, parts = folder.name, component_names(index)
    if is_snapshot_complete(repo, folder, parts, weights=weights):
        return folder
    with translate_hub_errors(repo, commit), hide_bars_without_terminal():
        patterns = ["*.json", *(f"{part}/{files}" for part in parts for files in PART_FILES)]
        matches = snapshot_download(repo, revision=commit, allow_patterns=patterns, dry_run=True)
        names = set(select_files([file.filename for file in matches], parts, weights=weights))
        files = [file for file in matches if file.filename in names]
        require_disk_space(repo, [file for file in files if file.will_download])
        with log_download_progress(repo, files):
            snapshot_download(repo, revision=commit, allow_patterns=sorted(names))
    return folder


def component_names(index: Mapping[str, Any]) -> list[str]:
    """Return the names of the components in model_index.json that have a folder. Components set to null are omitted."""
    return [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]


def select_files(files: Sequence[str], parts: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return the file names in `files` that are needed to load the components named in `parts`.

    If a component has plain weights (model.safetensors), its variants (model.fp16.safetensors) are skipped.
    """
    plain = {parent_folder(name) for name in files if name.endswith(WEIGHTS) and parse_variant(file_name(name)) is None}

    def is_needed(name: str) -> bool:
        if "/" not in name:
            return name.endswith(".json")
        if parent_folder(name) not in parts or not name.endswith(tuple(suffix[1:] for suffix in PART_FILES)):
            return False
        if not weights and name.endswith(WEIGHTS):
            return False
        return file_variant(file_name(name)) is None or parent_folder(name) not in plain

    return [name for name in files if is_needed(name)]


def file_variant(name: str) -> str | None:
    """Return the variant, such as "fp16", in the name of a weight file or shard index.

    Returns None for plain weights.
    """
    index = INDEX_NAME.fullmatch(name)
    return parse_variant(name) if index is None else index["variant"]


def parent_folder(name: str) -> str:
    return name.rpartition("/")[0]


def file_name(name: str) -> str:
    return name.rpartition("/")[2]


def is_snapshot_complete(repo: str, folder: Path, parts: Sequence[str], *, weights: bool) -> bool:
    """Return whether the snapshot folder has all files of the components in `parts`.

    Uses the file list that the last download saved. If there is no list, each component folder must contain files and
    all shards of its weights.
    """
    try:
        files = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return all(has_component_files(folder / part, weights=weights) for part in parts)
    return all((folder / name).is_file() for name in select_files(files, parts, weights=weights))


def has_component_files(folder: Path, *, weights: bool) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    totals = {match[1] for name in names if (match := re.search(r"-of-(\d+)\b", name)) is not None}
    has_shards = all(sum(f"-of-{total}" in name for name in names) >= int(total) for total in totals)
    has_weights = "config.json" not in names or any(name.endswith(WEIGHTS) for name in names)
    return bool(names) and (not weights or (has_shards and has_weights))


def require_disk_space(repo: str, files: Sequence[DryRunFileInfo]) -> None:
    """Raise ModelError if the disk of the Hub cache has too little free space for these files."""
    needed, cache = total_bytes(files), Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"{repo} needs {needed / 1e9:.1f} GB in {cache}, but {free / 1e9:.1f} GB are free: free some, or set "
            "HF_HOME to a larger disk"
        )


def total_bytes(files: Sequence[DryRunFileInfo]) -> int:
    return sum(file.file_size or 0 for file in files)


@contextmanager
def hide_bars_without_terminal() -> Iterator[None]:
    """Hide huggingface_hub's progress bars if stderr is not a terminal.

    In a log file, each update of a bar would be a separate line.
    """
    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


@contextmanager
def log_download_progress(repo: str, files: Sequence[DryRunFileInfo]) -> Iterator[None]:
    """Log the size of the download now, and a message every PROGRESS_INTERVAL_S seconds until the block ends.

    Each message also reports progress to the hang watchdog.
    """
    todo = [file for file in files if file.will_download]
    log.info(
        "model %s: %.1f GB, downloading %d of %d files (%.1f GB in the cache)",
        *(repo, total_bytes(files) / 1e9, len(todo), len(files), (total_bytes(files) - total_bytes(todo)) / 1e9),
    )
    finished = threading.Event()

    def log_periodically() -> None:
        while not finished.wait(PROGRESS_INTERVAL_S):
            LIVENESS.record_progress()
            log.info("model %s: still downloading", repo)

    thread = threading.Thread(target=log_periodically, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


@contextmanager
def translate_hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert exceptions of huggingface_hub to ModelError with a message that says what to do."""
    at = f" --revision {revision}" if revision is not None else ""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} requires that you accept its licence: open https://huggingface.co/{repo}, accept it, then run "
            "hf auth login (or set HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo} is neither a local folder nor a Hub repository that you can access: check the spelling, or run hf "
            f"auth login{suggest_released_repo(repo)}"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no branch, tag or commit {revision}: change model.revision") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, DryRunError) as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the Hub did respond
            raise ModelError(download_failure(repo, error.__cause__)) from error
        raise ModelError(
            f"{repo} is not in the Hub cache (and not a local folder), and the Hub cannot be reached; on a machine "
            f'with a network: hf download {repo}{at} --exclude "*.bin"{suggest_released_repo(repo)}'
        ) from error
    except HFValidationError as error:
        raise ModelError(
            f"{repo} is neither a local folder nor owner/name on the Hub: {shorten_error(error)}"
        ) from error
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise ModelError(download_failure(repo, error)) from error
    except OSError as error:  # disk error
        raise ModelError(f"{repo} cannot be written to {constants.HF_HUB_CACHE} ({error}): set HF_HOME") from error


def download_failure(repo: str, error: Exception) -> str:
    return f"{repo} cannot be downloaded from the Hub ({shorten_error(error)}): try again later"


def shorten_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def missing_index_message(repo: str, revision: str | None, files: Sequence[str]) -> str:
    branch = RELEASED_REPOS.get(repo)
    if branch is not None and revision != branch:
        return f"the diffusers pipeline of {repo} is in another branch: set model.revision: {branch}"
    if any(name.endswith(COSMOS_CHECKPOINT_SUFFIX) for name in files):
        return f"{repo} contains original Cosmos checkpoints; convert one: {cosmos_conversion_command('FILE', repo)}"
    closest = closest_released_repo(repo)
    if closest is not None and closest.lower().startswith(repo.lower()):
        return f"{repo} is not in diffusers' format; {closest} is"
    return f"{repo} has no {INDEX}: choose a repository in diffusers' format{suggest_released_repo(repo)}"


def closest_released_repo(path: str) -> str | None:
    """Return the released repository with the name most similar to `path`, or None if none is similar."""
    by_name = {file_name(repo).lower(): repo for repo in RELEASED_REPOS}
    near = difflib.get_close_matches(file_name(path).lower(), by_name, n=1, cutoff=0.7)
    return by_name[near[0]] if near else None


def suggest_released_repo(path: str) -> str:
    """Return a hint for an error message that names the released repository most similar to `path`.

    Returns "" if no released repository is similar.
    """
    repo = closest_released_repo(path)
    if repo is None or repo == path:
        return ""
    at = f" model.revision={RELEASED_REPOS[repo]}" if RELEASED_REPOS[repo] is not None else ""
    return f"; for the released model: model.path={repo}{at}"


def display_name(folder: Path) -> str:
    """Return the name of a pipeline folder for messages.

    The name is repository and commit if the folder is a Hub snapshot, and otherwise the path.
    """
    source = snapshot_origin(folder)
    return str(folder) if source is None else f"{source[0]} @ {source[1][:7]}"


def snapshot_origin(folder: Path) -> tuple[str, str] | None:
    """Return (owner/name, commit) of a snapshot folder in the Hub cache, or None for any other folder."""
    cache, name, commit = folder.parent.parent.parent, folder.parent.parent.name, folder.name
    if folder.parent.name != "snapshots" or not name.startswith("models--") or not is_commit(commit):
        return None
    return (name.removeprefix("models--").replace("--", "/", 1), commit) if cache.is_dir() else None
