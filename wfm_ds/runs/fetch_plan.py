"""Plan what to download for a recipe: the model, prompts, LeRobot data and rewards that this machine lacks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import DryRunFileInfo, constants, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from wfm_ds.data.datasets import lerobot_sources
from wfm_ds.data.lerobot import list_missing_files
from wfm_ds.data.prompt_sources import PROMPT_SOURCES, download_prompt_set, missing_bytes
from wfm_ds.data.prompts import PROMPT_FORMATS
from wfm_ds.errors import ModelError, RewardError, UserError
from wfm_ds.models import registry
from wfm_ds.models.assets import hub, language_folders
from wfm_ds.models.assets.hub_errors import HubConnectionError
from wfm_ds.models.assets.loading import read_json, read_weight_map
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import HeldOutReward
from wfm_ds.runs.model_revision import locate_model, set_revision
from wfm_ds.storage.filesystem import existing_parent, is_repo_id

GLOB_CHARACTERS = frozenset("*?[{")
TRANSFORMERS_FILES = (*language_folders.FILE_PATTERNS, "pytorch_model*.bin")
GUARDRAIL_NOTE = (
    "guardrail: when the run starts, the package cosmos_guardrail downloads nvidia/Cosmos-Guardrail1: accept its "
    "licence on the Hub first, or set model.guardrail: off"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchItem:
    """One download: files of a Hub repository, or a prompt set."""

    purpose: str
    """`model`, `prompts`, `data` or the name of a reward."""
    source: str
    num_bytes: int
    licence: str
    target: Path
    download: Callable[[], object]
    """Function that downloads the files. Raises UserError if the download fails."""


@dataclass(slots=True)
class FetchPlan:
    """The missing files of a recipe: `items` can be downloaded, `notes` and `unreachable` describe the others."""

    items: list[FetchItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """One sentence for each missing part that `wfm fetch` cannot download."""
    unreachable: list[str] = field(default_factory=list)
    """Parts with missing files that cannot be downloaded, because the Hub cannot be reached."""

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @contextlib.contextmanager
    def collect_unreachable(self, part: str) -> Iterator[None]:
        try:
            yield
        except HubConnectionError:
            self.unreachable.append(part)


def plan_downloads(recipe: Recipe) -> FetchPlan:
    """List the downloads of a recipe. Requests only metadata from servers: sizes, licences, and meta/ of LeRobot data.

    Cached branches keep their commits. Raises UserError if files are missing and the Hub cannot be reached or denies
    access, ModelError if the model is not supported, and DataError if LeRobot data does not fit the recipe.
    """
    plan = FetchPlan()
    plan.items += plan_model(recipe, plan)
    plan.items += plan_prompts(recipe, plan.notes)
    plan.items += plan_lerobot_data(recipe, plan)
    plan.items += plan_rewards(recipe, plan)
    plan.notes += list_own_data(recipe)
    if plan.unreachable:
        raise UserError(
            f"the Hub cannot be reached, and {constants.HF_HUB_CACHE} lacks files of {', '.join(plan.unreachable)}: "
            "repeat the command when there is a network (and HF_HUB_OFFLINE is not set)"
        )
    return plan


def require_free_space(items: Sequence[FetchItem]) -> dict[Path, int]:
    """Return {target folder: free bytes}. Raises UserError if the downloads do not fit on their disks."""
    free: dict[Path, int] = {}
    needed: dict[int, int] = {}
    for item in items:
        existing = existing_parent(item.target)
        free[item.target] = shutil.disk_usage(existing).free
        disk = existing.stat().st_dev
        needed[disk] = needed.get(disk, 0) + item.num_bytes
        if needed[disk] > free[item.target]:
            raise UserError(
                f"{item.target} needs {needed[disk] / 1e9:.1f} GB, but {free[item.target] / 1e9:.1f} GB are free: free "
                "some, or set HF_HOME (models) or data.path (prompts) to a larger disk"
            )
    return free


# ---- model


def plan_model(recipe: Recipe, plan: FetchPlan) -> Iterator[FetchItem]:
    repo, revision = recipe.model.path, recipe.model.revision
    if not is_repo_id(repo):
        try:
            locate_model(recipe)
        except ModelError as error:
            plan.notes.append(f"model: {error}")
        return
    with plan.collect_unreachable(f"model {repo}"):
        folder = locate_model(set_revision(recipe, hub.resolve_commit(repo, revision)))
        if recipe.algorithm.trains_language:
            is_complete = language_folders.is_language_snapshot_complete(repo, folder)
            files = [] if is_complete else language_folders.list_language_files(repo, folder.name)
        else:
            files = list_pipeline_files(repo, folder)
            if registry.find_family(folder, recipe.model.family).has_guardrail and recipe.model.guardrail == "stock":
                plan.notes.append(GUARDRAIL_NOTE)
        yield from plan_hub_files("model", repo, revision, files)


def list_pipeline_files(repo: str, folder: Path) -> list[DryRunFileInfo]:
    """Return the files of a pipeline, or [] if they are all cached. folder: its snapshot folder."""
    parts = hub.component_names(read_json(folder / hub.INDEX))
    if hub.is_snapshot_complete(repo, folder, parts, weights=True):
        return []
    return hub.list_component_files(repo, folder.name, parts)


def plan_hub_files(
    purpose: str,
    repo: str,
    revision: str | None,
    files: Sequence[DryRunFileInfo],
    repo_type: str = "model",
    patterns: Sequence[str] = (),
) -> Iterator[FetchItem]:
    """Yield the download of `files` if the cache lacks some. It updates the commit of the branch `revision`."""
    missing = [file for file in files if file.will_download]
    if missing:
        commit = missing[0].commit_hash
        yield FetchItem(
            purpose=purpose,
            source=f"{repo} @ {commit[:7]}",
            num_bytes=hub.total_bytes(missing),
            licence=hub.read_licence(repo, commit, repo_type),
            target=Path(constants.HF_HUB_CACHE),
            download=partial(hub.download_files, repo, revision, files, repo_type, patterns),
        )


# ---- data


def list_published_files(data: DataRecipe) -> list[Path]:
    """Return the files of a published prompt set in the data folder, or [] for other data. They need not exist."""
    if data.kind != "prompts" or data.name not in PROMPT_SOURCES:
        return []
    return [data.folder / file.name for file in PROMPT_SOURCES[data.name].files]


def plan_prompts(recipe: Recipe, notes: list[str]) -> Iterator[FetchItem]:
    data, published = recipe.data, list_published_files(recipe.data)
    if not published:
        return
    needed = [data.folder / name.format(split=data.split) for name in PROMPT_FORMATS[data.name][0]]
    if any(path.is_file() for path in needed):
        needed = []
    elif not {*needed} & {*published}:
        notes.append(f"data.split {data.split}: the published prompt set {data.name} has no file {needed[0].name}")
    if recipe.validation.prompts is not None and not recipe.validation.prompts.is_file():
        needed.append(recipe.validation.prompts)
    if not {*needed} & {*published}:
        return
    source = PROMPT_SOURCES[data.name]
    yield FetchItem(
        purpose="prompts",
        source=f"{data.name} of github.com/{source.repository}",
        num_bytes=missing_bytes(data.name, data.folder),
        licence=source.licence,
        target=data.folder,
        download=lambda: list(download_prompt_set(data.name, data.folder)),
    )


def plan_lerobot_data(recipe: Recipe, plan: FetchPlan) -> Iterator[FetchItem]:
    """Yield the downloads of LeRobot data sets on the Hub. Downloads their metadata, which lists their files."""
    planned = set[str]()
    for data, repo in lerobot_sources(recipe):
        if not is_repo_id(repo):
            continue
        with plan.collect_unreachable(f"data {repo}"):
            revision = data.options.get("revision")
            commit = hub.resolve_commit(repo, revision, "dataset")
            patterns = list_missing_files(data, repo, commit)
            files = hub.list_files(repo, commit, patterns, "dataset") if patterns else []
            new = [file for file in files if file.local_path not in planned]
            planned |= {file.local_path for file in new}
            yield from plan_hub_files("data", repo, revision, new, "dataset", patterns)


def list_own_data(recipe: Recipe) -> list[str]:
    """Return a sentence for each part of the data that does not exist here and that `wfm fetch` does not download."""
    data, validation, published = recipe.data, recipe.validation, list_published_files(recipe.data)
    can_be_on_hub = data.kind in ("hf", "lerobot")
    is_on_hub = can_be_on_hub and is_repo_id(data.shard_patterns[0])
    is_validation_on_hub = can_be_on_hub and not data.streaming and is_repo_id(validation.path or "")
    paths = {
        "data.path": [] if is_on_hub or published else data.shard_patterns,
        "data.media_path": [data.media_path or ""],
        "validation.path": [] if is_validation_on_hub else [validation.path or ""],
        "validation.prompts": [] if validation.prompts in published else [str(validation.prompts or "")],
    }
    notes = [
        f"{key} {path} does not exist, and wfm fetch does not download it (docs/data.md, docs/prompts.md)"
        for key, values in paths.items()
        for path in values
        if path and "://" not in path and not GLOB_CHARACTERS & set(path) and not Path(path).expanduser().exists()
    ]
    if data.kind == "hf":
        on_hub = {"data.path": is_on_hub and data.path, "validation.path": is_validation_on_hub and validation.path}
        message = "the package datasets downloads this data set when the run starts"
        notes += [f"{key} {path}: {message}" for key, path in on_hub.items() if path]
    return notes


# ---- rewards


def plan_rewards(recipe: Recipe, plan: FetchPlan) -> Iterator[FetchItem]:
    settings = recipe.all_reward_settings
    if settings is None:
        return
    if settings.endpoint is not None:
        names = ", ".join(function.name for function in settings.functions)
        plan.notes.append(
            f"rewards {names}: the service at {settings.endpoint} needs their weights (docs/reward_service.md)"
        )
        return
    planned: set[tuple[str, str]] = set()
    for function in settings.functions:
        for address, kind in reward_addresses(function, plan.notes):
            if (address, kind) not in planned:
                planned.add((address, kind))
                with plan.collect_unreachable(f"reward {function.name} ({address})"):
                    yield from plan_reward_files(function.name, address, kind)


def reward_addresses(function: HeldOutReward, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (Hub address, kind of files) for each option of a reward that is a Hub address, not a local path."""
    from wfm_reward.registry import get_reward_class

    reward = get_reward_class(function.name)
    if reward.download_note:
        notes.append(f"reward {function.name}: {reward.download_note}")
    parameters = reward.option_parameters()
    for option, kind in reward.hub_files.items():
        if option not in parameters:
            raise RewardError(f"reward {function.name}: hub_files of the class names {option}, which is not an option")
        address: Any = function.options.get(option, parameters[option].default)
        if isinstance(address, str) and not Path(address).expanduser().exists():
            yield address, kind


def plan_reward_files(name: str, address: str, kind: str) -> Iterator[FetchItem]:
    repo, _, file = address.partition(":")
    if not is_repo_id(repo):
        raise UserError(f"reward {name}: {address} does not exist: set the option to a local path or a Hub address")
    commit = hub.resolve_commit(repo, None)
    folder = hub.find_cached_snapshot(repo, commit)
    if kind == "pipeline":
        files = list_pipeline_files(repo, hub.download_index(repo, commit))
    elif kind == "file":
        if folder is not None and (folder / file).is_file():
            return
        files = hub.list_files(repo, commit, [file])
        if not files:
            raise UserError(f"reward {name}: {repo} has no file {file}: change the option")
    else:
        weights = kind == "model"
        if folder is not None and is_transformers_snapshot_complete(repo, folder, weights=weights):
            return
        files = hub.list_files(repo, commit, TRANSFORMERS_FILES)
        names = set(select_transformers_files([file.filename for file in files], weights=weights))
        files = [file for file in files if file.filename in names]
    yield from plan_hub_files(name, repo, None, files)


def is_transformers_snapshot_complete(repo: str, folder: Path, *, weights: bool) -> bool:
    """Return whether the snapshot folder has all files that transformers loads.

    Uses the file list that the last download saved. Without a list, checks only the weights and one file of the
    processor.
    """
    try:
        names = [file.path for file in get_cached_repo_tree(repo, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        names = [path.name for path in folder.iterdir()]
        if not any(name.endswith("processor_config.json") or name.startswith("tokenizer") for name in names):
            return False
        if weights and not any(name.endswith((".safetensors", ".bin", ".index.json")) for name in names):
            return False
        for index in folder.glob("*.index.json"):
            names += read_weight_map(index).values()
    needed = select_transformers_files(names, weights=weights)
    return all((folder / name).is_file() for name in needed)


def select_transformers_files(names: Iterable[str], *, weights: bool) -> list[str]:
    """Return the files that transformers loads: configuration, processor and, with `weights`, one set of weights."""
    top = [name for name in names if any(fnmatchcase(name, form) for form in TRANSFORMERS_FILES) and "/" not in name]
    unused = ".bin" if any(name.endswith(".safetensors") for name in top) else ".safetensors"
    suffixes = (unused, f"{unused}.index.json") if weights else (".bin", ".safetensors", ".index.json")
    return [name for name in top if not name.endswith(suffixes)]
