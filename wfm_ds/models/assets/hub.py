"""Downloads pipelines from the Hugging Face Hub to the Hub cache. If all files are cached, no network is used."""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import shutil
import socket
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import (
    DryRunFileInfo,
    HfApi,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import call_periodically, format_duration, write_line
from wfm_ds.errors import ModelError
from wfm_ds.models.assets.hub_errors import HubConnectionError, translate_hub_errors
from wfm_ds.models.assets.released_repos import (
    COSMOS_CHECKPOINT_SUFFIX,
    RELEASED_REPOS,
    closest_released_repo,
    cosmos_conversion_command,
    suggest_released_repo,
)
from wfm_ds.models.assets.weight_files import parse_variant
from wfm_ds.storage.filesystem import existing_parent

log = logging.getLogger(__name__)

INDEX = "model_index.json"
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
INDEX_NAME = re.compile(r".+\.safetensors\.index(?:\.(?P<variant>\w+))?\.json")
WEIGHTS = ".safetensors"
PART_SUFFIXES = (".json", WEIGHTS, ".txt", ".model", ".jinja")
PROGRESS_INTERVAL_S = 30.0
LANGUAGE_ADVICE = (
    "is a vision-language model: use data.kind: llava, as in the recipe reason_llava_sft (docs/reasoner.md)"
)


def require_pipeline_folder(path: str | Path) -> Path:
    """Return `path` as a Path. Raises ModelError if it is not a local folder."""
    folder = Path(path).expanduser()
    if os.path.isdir(folder):  # os.path returns False without permission; Path would raise
        return folder
    if folder.name.endswith(COSMOS_CHECKPOINT_SUFFIX):
        command = cosmos_conversion_command(str(folder), str(folder))
        raise ModelError(f"{folder} is an original Cosmos checkpoint; convert it: {command}")
    problem = "is a file" if os.path.isfile(folder) else "does not exist"
    raise ModelError(
        f"{folder} {problem}; model.path must be a local diffusers pipeline folder, owner/name on the Hub, or "
        f"tiny:FAMILY{suggest_released_repo(str(folder))}"
    )


def is_commit(revision: str | None) -> bool:
    return revision is not None and COMMIT_HASH.fullmatch(revision) is not None


@functools.cache
def can_find_host(host: str | None) -> bool:
    """Return whether DNS resolves the host name. If a proxy is set, return True without a lookup."""
    if urllib.request.getproxies().keys() - {"no"}:  # the key `no` is the variable NO_PROXY, not a proxy
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set or the host name of the Hub cannot be resolved."""
    return constants.HF_HUB_OFFLINE or not can_find_host(urllib.parse.urlsplit(constants.ENDPOINT).hostname)


def resolve_commit(repo: str, revision: str | None, repo_type: str = "model") -> str:
    """Return the commit hash of a branch or tag (default: main). A commit hash is returned unchanged.

    Without a connection, returns the commit of the last download, or raises HubConnectionError if there is none. Raises
    ModelError if the Hub denies access.
    """
    if revision is not None and is_commit(revision):
        return revision
    try:
        with translate_hub_errors(repo, revision):
            if is_offline():
                raise OfflineModeIsEnabled
            return str(HfApi().repo_info(repo, revision=revision, repo_type=repo_type).sha)
    except HubConnectionError:
        folder = find_cached_snapshot(repo, revision, repo_type)
        if folder is None:
            raise
        return folder.name


def find_cached_snapshot(repo: str, revision: str | None, repo_type: str = "model") -> Path | None:
    """Return the snapshot folder of the last download, which may lack files, or None."""
    try:
        return Path(
            snapshot_download(repo, repo_type=repo_type, revision=revision, allow_patterns=[], local_files_only=True)
        )
    except LocalEntryNotFoundError:
        return None


def is_in_cache(repo: str) -> bool:
    """Return whether the Hub cache has a snapshot of any commit of the model, which may lack files."""
    return os.path.isdir(Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "snapshots"))


def download_first_file(repo: str, name: str, revision: str | None) -> Path:
    """Download one file to the Hub cache and return the snapshot folder that contains the file.

    On an offline machine, reads only the cache. Raises the same errors as hf_hub_download.
    """
    # Without a connection, huggingface_hub would retry for half a minute.
    return Path(hf_hub_download(repo, name, revision=revision, local_files_only=is_offline())).parent


def download_index(repo: str, revision: str | None) -> Path:
    """Download model_index.json and return the snapshot folder. The folder's name is the commit hash.

    Raises ModelError if the repository has no model_index.json, or if the file is neither cached nor downloadable.
    """
    with translate_hub_errors(repo, revision), hide_bars_without_terminal():
        try:
            return download_first_file(repo, INDEX, revision)
        except RemoteEntryNotFoundError:
            raise ModelError(
                missing_index_message(repo, revision, HfApi().list_repo_files(repo, revision=revision))
            ) from None


def download_components(repo: str, folder: Path, index: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Download the missing files of a pipeline's components to the snapshot folder `folder`, and return `folder`.

    index: content of model_index.json. Raises ModelError if the download fails or the disk is too small.
    """
    commit, parts = folder.name, component_names(index)
    if is_snapshot_complete(repo, folder, parts, weights=weights):
        return folder
    download_files(repo, commit, list_component_files(repo, commit, parts, weights=weights))
    return folder


def list_component_files(repo: str, commit: str, parts: Sequence[str], *, weights: bool = True) -> list[DryRunFileInfo]:
    """Return the files of the components `parts`, with their sizes and whether they are cached.

    Raises ModelError if the Hub cannot be reached or denies access.
    """
    patterns = ["*.json", *(f"{part}/*{suffix}" for part in parts for suffix in PART_SUFFIXES)]
    matches = list_files(repo, commit, patterns)
    names = set(select_files([file.filename for file in matches], parts, weights=weights))
    return [file for file in matches if file.filename in names]


def list_files(
    repo: str, revision: str | None, patterns: Sequence[str], repo_type: str = "model"
) -> list[DryRunFileInfo]:
    """Return the files that match a pattern. Raises ModelError if the Hub cannot be reached or denies access."""
    with translate_hub_errors(repo, revision), hide_bars_without_terminal():
        return snapshot_download(
            repo,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=list(patterns),
            dry_run=True,
            local_files_only=is_offline(),
        )


def download_files(
    repo: str,
    revision: str | None,
    files: Sequence[DryRunFileInfo],
    repo_type: str = "model",
    patterns: Sequence[str] = (),
) -> None:
    """Download files to the Hub cache. Raises ModelError if this fails or the disk is too small.

    patterns: patterns that match the files, for many files: each file is compared with each pattern.
    """
    with translate_hub_errors(repo, revision), hide_bars_without_terminal():
        require_disk_space(repo, [file for file in files if file.will_download])
        with log_download_progress(f"{repo_type} {repo}", files):
            names = patterns or sorted(glob.escape(file.filename) for file in files)
            snapshot_download(repo, repo_type=repo_type, revision=revision, allow_patterns=list(names))


def read_licence(repo: str, commit: str, repo_type: str = "model") -> str:
    """Return the licence on a repository's Hub page, or "not stated". Raises ModelError if the Hub does not respond."""
    with translate_hub_errors(repo, commit):
        info = HfApi().repo_info(repo, revision=commit, repo_type=repo_type)
    card = getattr(info, "card_data", None)
    licence = str((card and (card.get("license_name") or card.get("license"))) or "not stated")
    return f"{licence} (gated)" if info.gated else licence


def component_names(index: Mapping[str, Any]) -> list[str]:
    """Return the names of the components in model_index.json that are not null."""
    return [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]


def select_files(files: Sequence[str], parts: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return the names in `files` that are needed to load the components `parts`.

    If a component has plain weights (model.safetensors), its variants (model.fp16.safetensors) are skipped.
    """
    paths = [PurePosixPath(name) for name in files]
    plain = {path.parent for path in paths if path.suffix == WEIGHTS and parse_variant(path.name) is None}

    def is_needed(path: PurePosixPath) -> bool:
        if len(path.parts) == 1:
            return path.suffix == ".json"
        if str(path.parent) not in parts or path.suffix not in PART_SUFFIXES:
            return False
        if not weights and path.suffix == WEIGHTS:
            return False
        index = INDEX_NAME.fullmatch(path.name)
        variant = parse_variant(path.name) if index is None else index["variant"]
        return variant is None or path.parent not in plain

    return [name for name, path in zip(files, paths, strict=True) if is_needed(path)]


def is_snapshot_complete(repo: str, folder: Path, parts: Sequence[str], *, weights: bool) -> bool:
    """Return whether the snapshot folder has all files of the components `parts`.

    If the last download saved no file list, checks only that no component folder is empty and no weight file is
    missing.
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
    """Raise ModelError if the disk of the Hub cache has too little free space."""
    needed, cache = total_bytes(files), Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(existing_parent(cache)).free
    if needed > free:
        raise ModelError(
            f"{repo} needs {needed / 1e9:.1f} GB in {cache}, but {free / 1e9:.1f} GB are free: free some, or set "
            "HF_HOME to a larger disk"
        )


def total_bytes(files: Sequence[DryRunFileInfo]) -> int:
    return sum(file.file_size or 0 for file in files)


@contextmanager
def hide_bars_without_terminal() -> Iterator[None]:
    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


@contextmanager
def log_download_progress(name: str, files: Sequence[DryRunFileInfo]) -> Iterator[None]:
    """Inside the context, log a download's size and progress, and reset the hang watchdog.

    name: such as "model owner/name".
    """
    todo = [file for file in files if file.will_download]
    log.info(
        "%s: %.1f GB, downloading %d of %d files (%.1f GB in the cache)",
        *(name, total_bytes(files) / 1e9, len(todo), len(files), (total_bytes(files) - total_bytes(todo)) / 1e9),
    )

    start_s, present, total = time.monotonic(), bytes_on_disk(todo), total_bytes(todo)

    def report() -> None:
        LIVENESS.record_progress()
        if are_progress_bars_disabled():  # also for commands without logging, such as wfm fetch
            done = min(bytes_on_disk(todo), total)
            left = ""
            if done > present:
                left_s = (time.monotonic() - start_s) / (done - present) * (total - done)
                left = f", {format_duration(left_s)} left"
            write_line(f"{name}: still downloading, {done / 1e9:.1f} of {total / 1e9:.1f} GB{left}")

    with call_periodically(report, PROGRESS_INTERVAL_S):
        yield


def bytes_on_disk(files: Sequence[DryRunFileInfo]) -> int:
    """Return how many bytes of `files` (all of one repository) are in the Hub cache, incomplete files included."""
    num_bytes = total_bytes([file for file in files if os.path.exists(file.local_path)])
    for file in files[:1]:
        blobs = Path(file.local_path.partition("/snapshots/")[0], "blobs")
        with suppress(OSError):
            for path in blobs.glob("*.incomplete"):
                with suppress(OSError):  # completed since, or a network file system failed
                    num_bytes += path.stat().st_size
    return num_bytes


def missing_index_message(repo: str, revision: str | None, files: Sequence[str]) -> str:
    branch = RELEASED_REPOS.get(repo)
    if branch is not None and revision != branch:
        return f"the diffusers pipeline of {repo} is in another branch: set model.revision: {branch}"
    if any(name.endswith(COSMOS_CHECKPOINT_SUFFIX) for name in files):
        return f"{repo} contains original Cosmos checkpoints; convert one: {cosmos_conversion_command('FILE', repo)}"
    if {"config.json", "preprocessor_config.json"} <= set(files):
        return f"{repo} {LANGUAGE_ADVICE}"
    closest = closest_released_repo(repo)
    if closest is not None and closest.lower().startswith(repo.lower()):
        return f"{repo} is not in diffusers' format; {closest} is"
    return f"{repo} has no {INDEX}: choose a repository in diffusers' format{suggest_released_repo(repo)}"


def display_name(folder: Path) -> str:
    """Return a folder's name for messages: repository and commit of a Hub snapshot, or the path of another folder."""
    source = snapshot_origin(folder)
    return str(folder) if source is None else f"{source[0]} @ {source[1][:7]}"


def snapshot_origin(folder: Path) -> tuple[str, str] | None:
    """Return (owner/name, commit) of a snapshot folder in the Hub cache, or None for any other folder."""
    cache, name, commit = folder.parent.parent.parent, folder.parent.parent.name, folder.name
    if folder.parent.name != "snapshots" or not name.startswith("models--") or not is_commit(commit):
        return None
    return (name.removeprefix("models--").replace("--", "/", 1), commit) if cache.is_dir() else None
