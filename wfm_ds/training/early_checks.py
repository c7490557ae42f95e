"""Checks that do not import torch, so that mistakes in a recipe are reported at once."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from wfm_ds.data.captioned_folder import require_media_folder
from wfm_ds.data.datasets import choose_held_out_source
from wfm_ds.data.folder_layout import detect_layout
from wfm_ds.data.lerobot_info import download_metadata, find_roots
from wfm_ds.data.prompts import load_prompt_file, load_prompts
from wfm_ds.distributed.accelerator import is_accelerator_present
from wfm_ds.engine.optional_packages import require_packages
from wfm_ds.errors import DataError, RecipeError
from wfm_ds.language.annotations import annotation_files, read_content
from wfm_ds.models.assets import hub
from wfm_ds.models.assets.hub_errors import translate_hub_errors
from wfm_ds.models.assets.local_folders import require_local_model
from wfm_ds.monitoring.trackers import require_trackers
from wfm_ds.recipe.algorithms import INITIAL_LORA
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.output_checks import require_usable_folder, require_writable_folder
from wfm_ds.runs.output_folder import find_run_start
from wfm_ds.storage.filesystem import expand_pattern, is_remote, is_repo_id


def check_early(recipe: Recipe, world_size: int | None = None, *, overwrite: bool = False) -> None:
    """Check folders, packages, model, data, rewards and ports. Writes nothing, and does not use the network.

    world_size: number of ranks, to check whether an earlier run in the output folder can be continued. None: unknown.
    Raises UserError if a check fails.
    """
    require_usable_folder(recipe.run.output_dir)
    if recipe.data.cache_dir is not None and not recipe.algorithm.trains_language:
        require_writable_folder(recipe.data.cache_dir, "data.cache_dir")
    # `find_run_start` needs the network if the model's commit must be resolved on the Hub, or if checkpoints are in S3.
    needs_network = (
        is_repo_id(recipe.model.path) or recipe.checkpoint.storage is not None or is_remote(recipe.run.resume)
    )
    if world_size is not None and not needs_network:
        find_run_start(recipe, world_size, overwrite=overwrite)
    require_packages(recipe)
    require_trackers(recipe)
    require_local_model(recipe.model.path, is_language_model=recipe.algorithm.trains_language)
    require_cached_model(recipe)
    require_teachers(recipe)
    require_data(recipe)
    check_reward_options(recipe)
    if recipe.is_async:
        check_workers(recipe)


def require_cached_model(recipe: Recipe) -> None:
    """With HF_HUB_OFFLINE, raise ModelError if the Hub cache has no files of the model at all."""
    repo, revision = recipe.model.path, recipe.model.revision
    if constants.HF_HUB_OFFLINE and is_repo_id(repo) and not hub.is_in_cache(repo):
        with translate_hub_errors(repo, revision):
            raise OfflineModeIsEnabled


def require_teachers(recipe: Recipe) -> None:
    """Raise RecipeError if the local LoRA of a teacher is missing."""
    for teacher in recipe.algorithm.list_lora_teachers().values():
        path = teacher.weights
        if path != INITIAL_LORA and not os.path.exists(path):
            raise RecipeError(f"teacher {path} does not exist: correct `weights` of the teacher in the recipe")


def require_data(recipe: Recipe) -> None:
    """Raise DataError if local data is missing, or if a prompt file is damaged. Images and videos are not opened."""
    data, validation = recipe.data, recipe.validation
    parts = [part for part, _ in data.set_recipes().values()] or [data]
    for part in parts:
        require_data_paths(part, part.shard_patterns)
    if data.streaming and validation.path is not None:  # a plain folder then
        detect_layout(Path(validation.path))
    elif (source := choose_held_out_source(recipe)) is not None:
        require_data_paths(*source)
    if validation.prompts is not None:
        load_prompt_file(validation.prompts)


def require_data_paths(data: DataRecipe, paths: list[str]) -> None:
    """Raise DataError if one of the local paths does not fit the kind of the data."""
    if data.is_user_kind or data.kind == "hf":
        return
    local = [path for path in paths if not is_remote(path)]
    if data.kind == "prompts":
        load_prompts(data.folder, data.name, data.split)
    elif data.kind == "llava":
        files = annotation_files(local)
        require_files(files)
        for file in files:
            read_content(file, num_bytes=1)
    elif data.kind in ("webdataset", "pairs"):
        require_files([file for path in local for file in expand_pattern(path)])
    elif data.kind == "lerobot":
        if local and os.path.isdir(local[0]):  # otherwise on the Hub
            find_roots(local[0])
        elif local and constants.HF_HUB_OFFLINE:
            download_metadata(local[0], data.options.get("revision"))  # reads only the cache
    elif data.kind == "folder":
        detect_layout(Path(paths[0]))
    else:
        require_media_folder(Path(paths[0]))


def require_files(files: list[str]) -> None:
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise DataError(f"{missing[0]}{more} not found: correct this path in the recipe (docs/data.md)")


def check_reward_options(recipe: Recipe) -> None:
    """If this run starts its reward service, raise RewardError for an unknown reward or an invalid option."""
    from wfm_reward import registry

    reward = recipe.all_reward_settings
    if reward is None or not reward.spawn:
        return
    for function in reward.functions:
        registry.check_reward(function.name, function.device, function.options, function.max_batch)


def check_workers(recipe: Recipe) -> None:
    """Raise RecipeError, PipeError or KeyFileError if rollout workers cannot be started or cannot connect."""
    from wfm_ds.rollout.remote.service import broker_endpoints, choose_worker_devices, load_trainer_keys
    from wfm_ds.transport.sockets import check_endpoint

    rollout = recipe.rl.rollout
    if is_accelerator_present():  # without an accelerator, --check may run for another machine
        choose_worker_devices(rollout, num_ranks=0)
    keys = load_trainer_keys(rollout)
    if rollout.bind != "ipc":
        for endpoint in broker_endpoints(rollout.bind, None):
            check_endpoint(endpoint, keys=keys is not None)
            require_free_port(endpoint)


def require_free_port(endpoint: str) -> None:
    """Raise RecipeError if another process listens at a tcp:// endpoint of this machine."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like ZeroMQ
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # not other errors: this may check another machine
                raise RecipeError(f"rollout.bind: port {port} of {endpoint} is in use: choose another port") from error
