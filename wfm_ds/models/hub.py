"""Pipelines of the Hugging Face hub: `owner/name` becomes a folder in the hub's cache on this machine.

First comes model_index.json alone, which says whether the pipeline is supported and what its parts are; then the files
of these parts. What is there is not asked for again, and a commit that is there needs no network at all. The token is
huggingface_hub's own affair: HF_TOKEN, or `hf auth login`.
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
from wfm_ds.models.variants import variant_in

log = logging.getLogger(__name__)

INDEX = "model_index.json"
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX_NAME = re.compile(r".+\.safetensors\.index(?:\.(?P<variant>\w+))?\.json")
PAGES = ("models", "datasets", "spaces")  # of the hub itself, so nobody's name: such a path is a folder of this disk
PART_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
WEIGHTS = ".safetensors"
TELL_S = 30.0
RELEASED = {  # the repositories in diffusers' format that the families know, with the branch if it is not main
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
COSMOS_ORIGINAL = "_ema_bf16.pt"  # how the names of the Cosmos zoo's own checkpoints end


def convert_cosmos(file: str, name: str) -> str:
    """The line that makes a pipeline of an original checkpoint of Cosmos-Predict2.5, whose `name` says its size."""
    size = "14B" if "14B" in name else "2B"
    return (
        f"python convert_cosmos_to_diffusers.py --transformer_type Cosmos-2.5-Predict-Base-{size} "
        f"--transformer_ckpt_path {file} --vae_type wan2.1 --output_path OUT --save_pipeline (a script of diffusers)"
    )


def is_id(path: str) -> bool:
    """Return whether a path is meant as `owner/name` of the hub: no folder of this machine has that name."""
    return ID.fullmatch(path) is not None and path.partition("/")[0] not in PAGES and not os.path.isdir(path)


def is_commit(revision: str | None) -> bool:
    return revision is not None and COMMIT.fullmatch(revision) is not None


def index_folder(repo: str, revision: str | None) -> Path:
    """Return the snapshot folder of a revision, in which model_index.json is; its name is the commit. ModelError where
    the hub, or the cache where there is no network, does not have it."""
    with explained(repo, revision), bars_on_terminals():
        try:
            return Path(hf_hub_download(repo, INDEX, revision=revision)).parent
        except RemoteEntryNotFoundError:
            raise ModelError(other_format(repo, revision, HfApi().list_repo_files(repo, revision=revision))) from None


def complete(repo: str, folder: Path, index: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Fetch what a snapshot folder lacks of its pipeline's parts, and return it; not `weights`: only what is beside
    them. ModelError as `index_folder`, and where the disk has too little space."""
    commit, parts = folder.name, parts_of(index)
    if is_complete(repo, folder, parts, weights=weights):
        return folder
    with explained(repo, commit), bars_on_terminals():
        patterns = ["*.json", *(f"{part}/{files}" for part in parts for files in PART_FILES)]
        found = snapshot_download(repo, revision=commit, allow_patterns=patterns, dry_run=True)
        names = set(wanted([file.filename for file in found], parts, weights=weights))
        files = [file for file in found if file.filename in names]
        require_space(repo, [file for file in files if file.will_download])
        with telling(repo, files):
            snapshot_download(repo, revision=commit, allow_patterns=sorted(names))
    return folder


def parts_of(index: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts that an index lists and does not leave out: each has a folder of its own."""
    return [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]


def wanted(files: Sequence[str], parts: Sequence[str], *, weights: bool = True) -> list[str]:
    """Return those of a repository's files that the pipeline is loaded from: of the weights of a part those without a
    variant (model.safetensors, not model.fp16.safetensors), where it has some; with `weights` off none of them."""
    plain = {folder(name) for name in files if name.endswith(WEIGHTS) and variant_in(base(name)) is None}

    def is_wanted(name: str) -> bool:
        if "/" not in name:
            return name.endswith(".json")
        if folder(name) not in parts or not name.endswith(tuple(suffix[1:] for suffix in PART_FILES)):
            return False
        if not weights and name.endswith(WEIGHTS):
            return False
        return variant_of(base(name)) is None or folder(name) not in plain

    return [name for name in files if is_wanted(name)]


def variant_of(name: str) -> str | None:
    """Return the variant that weights, or the index of their shards, belong to; None without one."""
    index = INDEX_NAME.fullmatch(name)
    return variant_in(name) if index is None else index["variant"]


def folder(name: str) -> str:
    return name.rpartition("/")[0]


def base(name: str) -> str:
    return name.rpartition("/")[2]


def is_complete(repo: str, folder: Path, parts: Sequence[str], *, weights: bool) -> bool:
    """Return whether all files of the parts are there: by the list that the last download kept, else by their
    folders, of which each holds something and as many weights as its index names."""
    try:
        listed = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return all(holds_part(folder / part, weights=weights) for part in parts)
    return all((folder / name).is_file() for name in wanted(listed, parts, weights=weights))


def holds_part(folder: Path, *, weights: bool) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    totals = {found[1] for name in names if (found := re.search(r"-of-(\d+)\b", name)) is not None}
    has_shards = all(sum(f"-of-{total}" in name for name in names) >= int(total) for total in totals)
    has_weights = "config.json" not in names or any(name.endswith(WEIGHTS) for name in names)
    return bool(names) and (not weights or (has_shards and has_weights))


def require_space(repo: str, files: Sequence[DryRunFileInfo]) -> None:
    """ModelError if the disk of the cache cannot hold these files."""
    needed, cache = total(files), Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(
            f"{repo} needs {needed / 1e9:.1f} GB in {cache}, where {free / 1e9:.1f} GB are free: free some, or set "
            "HF_HOME to a larger disk"
        )


def total(files: Sequence[DryRunFileInfo]) -> int:
    return sum(file.file_size or 0 for file in files)


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Show huggingface_hub's progress bars on a terminal alone: elsewhere each of their steps would be a line."""
    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


@contextmanager
def telling(repo: str, files: Sequence[DryRunFileInfo]) -> Iterator[None]:
    """Log what is about to be fetched, and every TELL_S seconds that it goes on, which also shows the run's watch that
    this process is not stuck."""
    todo = [file for file in files if file.will_download]
    log.info(
        "model %s: %.1f GB, %d of %d files to fetch (%.1f GB in the cache)",
        *(repo, total(files) / 1e9, len(todo), len(files), (total(files) - total(todo)) / 1e9),
    )
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TELL_S):
            LIVENESS.advance()
            log.info("model %s: still fetching", repo)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


@contextmanager
def explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a ModelError of one sentence that says what to do."""
    at = f" --revision {revision}" if revision is not None else ""
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{repo} asks you to accept its licence: open https://huggingface.co/{repo}, accept, then hf auth login "
            "(or set HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no {repo} that you may see, and there is no such folder here: check the spelling, or hf auth "
            f"login{suggestion(repo)}"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no branch, tag or commit {revision}: change model.revision") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, DryRunError) as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # it was reached
            raise ModelError(refused(repo, error.__cause__)) from error
        raise ModelError(
            f"{repo} is not in the hub cache of this machine (nor a folder here) and the hub cannot be reached; on a "
            f'machine with a network: hf download {repo}{at} --exclude "*.bin"{suggestion(repo)}'
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{repo} is neither a folder here nor owner/name of the hub: {one_line(error)}") from error
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise ModelError(refused(repo, error)) from error
    except OSError as error:  # of the disk
        raise ModelError(f"{repo} cannot be kept in {constants.HF_HUB_CACHE} ({error}): set HF_HOME") from error


def refused(repo: str, error: Exception) -> str:
    return f"{repo} cannot be fetched from the hub ({one_line(error)}): try again later"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def other_format(repo: str, revision: str | None, files: Sequence[str]) -> str:
    """Return the sentence for a repository without model_index.json."""
    known = RELEASED.get(repo)
    if known is not None and revision != known:
        return f"{repo} has a pipeline in diffusers' format in another branch: set model.revision: {known}"
    if any(name.endswith(COSMOS_ORIGINAL) for name in files):
        return f"{repo} holds original Cosmos checkpoints; convert one: {convert_cosmos('FILE', repo)}"
    near = nearest(repo)
    if near is not None and near.lower().startswith(repo.lower()):
        return f"{repo} is not in diffusers' format; {near} is"
    return f"{repo} has no {INDEX}: name a repository in diffusers' format{suggestion(repo)}"


def nearest(path: str) -> str | None:
    """Return the released repository whose name is most like that of a path; None if none is like it."""
    by_name = {base(repo).lower(): repo for repo in RELEASED}
    near = difflib.get_close_matches(base(path).lower(), by_name, n=1, cutoff=0.7)
    return by_name[near[0]] if near else None


def suggestion(path: str) -> str:
    """Return the end of a message about a path that is not there: the released pipeline that it may mean."""
    repo = nearest(path)
    if repo is None or repo == path:
        return ""
    at = f" model.revision={RELEASED[repo]}" if RELEASED[repo] is not None else ""
    return f"; for the released one: model.path={repo}{at}"


def name_of(folder: Path) -> str:
    """Return what a message calls a pipeline folder: its path, or the repository and commit that it is of."""
    found = origin(folder)
    return str(folder) if found is None else f"{found[0]} @ {found[1][:7]}"


def origin(folder: Path) -> tuple[str, str] | None:
    """Return `owner/name` and commit of a snapshot folder of the hub's cache; None for any other folder."""
    cache, name, commit = folder.parent.parent.parent, folder.parent.parent.name, folder.name
    if folder.parent.name != "snapshots" or not name.startswith("models--") or not is_commit(commit):
        return None
    return (name.removeprefix("models--").replace("--", "/", 1), commit) if cache.is_dir() else None
