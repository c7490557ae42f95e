"""Checks of model, data and rewards. A run calls them before it writes anything, and `--check` calls them too.

runs/output_folder.py checks the output folder.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path

import torch

from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.data.datasets import TrainingData, build_buckets, build_input_reader, find_usable_samples, load_data
from wfm_ds.data.hf_stream import HfStream
from wfm_ds.distributed.accelerator import is_accelerator_present, uses_cuda
from wfm_ds.distributed.world import ranks_per_node
from wfm_ds.engine.optional_packages import require_packages
from wfm_ds.errors import RecipeError
from wfm_ds.evaluation.paired_statistics import MIN_PROMPTS
from wfm_ds.memory.advice import memory_verdict
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.models.assets.hub import display_name
from wfm_ds.models.assets.loading import select_device
from wfm_ds.monitoring.trackers.choice import require_trackers
from wfm_ds.recipe.deepspeed import build_deepspeed_config
from wfm_ds.recipe.run_sizes import derive_run_sizes, num_replicas
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardFunction
from wfm_ds.rollout.remote.service import broker_endpoints, choose_worker_devices, load_trainer_keys
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.runs.check_report import CheckReport
from wfm_ds.runs.model_loading import choose_attention, find_family, load_model
from wfm_ds.runs.model_revision import pin_commit
from wfm_ds.runs.output_folder import RunStart, find_run_start
from wfm_ds.training.caches import keeps_text_encoders
from wfm_ds.training.reward_alarm import RECOMMENDED_PROMPTS
from wfm_ds.transport.sockets import check_endpoint
from wfm_ds.types import Prompt

log = logging.getLogger(__name__)

NUM_CHECKED_SAMPLES = 32  # samples that --check reads
MIN_PROMPT_DRAWS = 3  # draws per prompt in a run; with fewer, reward statistics of most prompts are unreliable


def check_rewards(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Check that the rewards can score these prompts and, if reward.endpoint is set, that the service replies.

    Raises RewardError or RecipeError if a check fails.
    """
    reward = recipe.all_reward_settings
    if reward is None:
        return
    family, inputs = find_family(recipe), recipe.data.inputs
    for function in reward.functions:
        check_reward_needs(
            function,
            prompts,
            is_local=reward.spawn,
            makes_video=family.is_video,
            provided_inputs=inputs,
            accepted_inputs=family.input_specs,
        )
    if reward.endpoint is not None:
        RewardClient(reward.endpoint, reward, run="check", client="check").close()


def check_workers(recipe: Recipe) -> None:
    """Raise RecipeError, PipeError or KeyFileError if rollout workers cannot be started or cannot connect."""
    rollout = recipe.rl.rollout
    if is_accelerator_present():  # without an accelerator, --check may run for another machine
        choose_worker_devices(rollout, num_ranks=0)
    keys = load_trainer_keys(rollout)
    if rollout.bind != "ipc":
        for endpoint in broker_endpoints(rollout.bind, None):
            check_endpoint(endpoint, keys=keys is not None)


def check_reward_needs(
    function: RewardFunction,
    prompts: Sequence[Prompt],
    *,
    is_local: bool,
    makes_video: bool,
    provided_inputs: Sequence[str] = (),
    accepted_inputs: Container[str] = (),
) -> None:
    """Raise RecipeError if a reward needs a media type, input or metadata that the run does not provide.

    is_local: whether this run starts the reward service. For a remote service, only built-in rewards are checked.
    provided_inputs: names in data.inputs.
    accepted_inputs: names of the inputs that the model accepts.
    Raises RewardError if a local reward has an invalid name, option or batch size.
    """
    from wfm_reward import registry as rewards

    if not is_local and function.name not in rewards.list_reward_names():
        return
    reward = rewards.get_reward_class(function.name)
    if not makes_video and "image" not in reward.media_types:
        raise RecipeError(
            f"reward {function.name} scores videos, but the model generates images: choose another reward or model"
        )
    for key in reward.required_inputs:
        if key in provided_inputs:
            continue
        if key in accepted_inputs:
            raise RecipeError(f"reward {function.name} needs {key}: add it to data.inputs, or choose another reward")
        raise RecipeError(
            f"reward {function.name} needs the input {key}, which this model does not accept: choose another "
            "reward, or a model that accepts it (docs/inputs.md)"
        )
    for key in reward.required_metadata:
        missing = [p.id for p in prompts if key not in p.metadata]
        if missing:
            raise RecipeError(
                f"reward {function.name} needs the metadata key {key!r}, missing in {len(missing)} of {len(prompts)} "
                f"prompts, e.g. {missing[0]}: add it to the prompt file or choose another reward"
            )
    if is_local:
        rewards.check_reward(function.name, function.device, function.options, function.max_batch)


def check_and_load_data(recipe: Recipe, world_size: int) -> TrainingData:
    """Run the quick checks and load the data. Writes nothing.

    The checks run in the order in which a user would fix the problems.
    """
    num_replicas(recipe, world_size, ranks_per_node=ranks_per_node(world_size))
    check_hosts(recipe, world_size, ranks_per_node(world_size))
    derived = derive_run_sizes(recipe, world_size)
    build_deepspeed_config(
        recipe,
        accumulation=derived.accumulation,
        policies=engine_policy_copies(recipe),
        world_size=world_size,
        ranks_per_node=ranks_per_node(world_size),
    )
    require_packages(recipe)
    require_trackers(recipe)
    find_family(recipe)
    data = load_data(recipe)
    for warning in [
        *recipe.algorithm.list_warnings(),
        *prompt_choice_warnings(recipe, data),
        *validation_reward_warnings(recipe, data),
    ]:
        log.warning(warning)
    if recipe.is_async:
        check_workers(recipe)
    if recipe.all_reward_settings is not None:
        check_rewards(recipe, list({p.id: p for p in [*data.prompts, *data.validation_prompts]}.values()))
    return data


def check_hosts(recipe: Recipe, world_size: int, num_local_ranks: int) -> None:
    """Raise RecipeError if the run uses several hosts and a service that only the first host can reach.

    num_local_ranks: number of ranks on the first host.
    """
    if num_local_ranks >= world_size:
        return
    unreached = f"cannot be reached by {world_size - num_local_ranks} of {world_size} ranks, which run on other hosts"
    reward = recipe.all_reward_settings
    if reward is not None and reward.spawn:
        if recipe.reward is None:
            raise RecipeError(f"validation.held_out_rewards: their service {unreached}: remove them, or use one host")
        raise RecipeError(
            f"reward.spawn: true: the reward service {unreached}: start a separate service, and set reward.spawn: "
            "false and reward.endpoint (docs/reward_service.md)"
        )
    if recipe.is_async and recipe.rl.rollout.bind == "ipc":
        raise RecipeError(
            f"rollout.bind: ipc {unreached}: set it to a tcp:// address of the first host, and set rollout.keys "
            "(docs/async.md)"
        )


def host_warnings(recipe: Recipe, world_size: int) -> list[str]:
    """Return a warning if the run needs several machines but uses a service that only one machine can reach.

    The function assumes that every machine has as many GPUs as this one.
    """
    num_gpus = torch.cuda.device_count() if uses_cuda() else 0
    if num_gpus == 0:  # perhaps a check for another machine
        return []
    try:
        check_hosts(recipe, world_size, min(num_gpus, world_size))
    except RecipeError as error:
        return [f"this machine has {num_gpus} GPUs. On several hosts: {error}"]
    return []


def draws_per_prompt(recipe: Recipe, data: TrainingData) -> float:
    """Return how often the run draws each prompt on average."""
    return recipe.run.steps * recipe.rl.rollout.prompts_per_step / len(data.prompts)


def prompt_choice_warnings(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return a warning if the run chooses prompts by reward std but draws each prompt too rarely to measure it.

    The limit is an average of MIN_PROMPT_DRAWS draws per prompt.
    """
    if recipe.data.choose == "even" or draws_per_prompt(recipe, data) >= MIN_PROMPT_DRAWS:
        return []
    return [
        f"data.choose: reward_std needs rewards of earlier draws, but this run draws each of its {len(data.prompts)} "
        f"prompts only {draws_per_prompt(recipe, data):.2g} times: set data.choose: even, or use fewer prompts"
    ]


def validation_reward_warnings(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return warnings if the reward-hacking alarm has too few validation prompts or evaluations."""
    if not recipe.validation.held_out_rewards or not recipe.is_rl:
        return []
    warnings, num_prompts = [], min(len(data.validation_prompts), recipe.validation.num_prompts)
    if num_prompts < RECOMMENDED_PROMPTS:
        effect = "no alarm is possible" if num_prompts < MIN_PROMPTS else "a decrease may be missed"
        warnings.append(
            f"validation.held_out_rewards score only {num_prompts} prompts: {effect}. "
            f"Set validation.num_prompts to {RECOMMENDED_PROMPTS}"
        )
    if recipe.validation.every == 0:
        warnings.append(
            "validation.held_out_rewards are only evaluated at the end, too late for an alarm: set validation.every"
        )
    return warnings


def check_diffusion_run(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> CheckReport:
    """Check a diffusion recipe and return the report of `--check`. Raises UserError if a check fails."""
    recipe = pin_commit(recipe, overwrite=overwrite)
    start = find_run_start(recipe, world_size, overwrite=overwrite)
    data = check_and_load_data(recipe, world_size)
    model = load_model(recipe, torch.device("cpu"))
    kernel = choose_attention(recipe, model, select_device(None))
    samples = data.samples
    if recipe.data.streaming:
        samples = [row.sample for row in HfStream(recipe.data).read(NUM_CHECKED_SAMPLES)]
    num_samples, inputs = len(samples) + len(data.held_out), build_input_reader(recipe, model, data)
    find_usable_samples(
        samples, recipe, build_buckets(recipe, model), NUM_CHECKED_SAMPLES, dataset_size=num_samples, inputs=inputs
    )
    for warning in host_warnings(recipe, world_size):
        log.warning(warning)
    if gpu_rewards := rewards_without_gpu(recipe):  # perhaps a check for another machine
        log.warning("the rewards were not started: this machine has no GPU for %s", ", ".join(gpu_rewards))
    else:
        check_spawned_rewards(recipe)
    sizes = estimate_memory(
        recipe, model, world_size, keeps_encoders=keeps_text_encoders(recipe, model, data, world_size)
    )
    choice = "" if recipe.data.choose == "even" else f", by reward_std, {draws_per_prompt(recipe, data):.3g} draws each"
    number = "a stream" if recipe.data.streaming else len(data.samples)
    counts = (
        ("prompts", f"{len(data.prompts)}{choice}")
        if recipe.is_rl
        else ("samples", f"{number} to train on, {len(data.held_out)} held out")
    )
    facts = dict(
        [
            ("recipe", f"{recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}"),
            ("model", display_name(model.path)),
            ("attention", kernel),
            counts,
            ("output", start_summary(start)),
        ]
    )
    judged = memory_verdict(recipe, sizes, gpu_memory())
    return CheckReport(facts=facts, run_sizes=derive_run_sizes(recipe, world_size), memory=sizes, verdict=judged)


def data_summary(recipe: Recipe, data: TrainingData) -> str:
    if recipe.is_rl:
        return f"{len(data.prompts)} prompts"
    number = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{number} samples to train on, {len(data.held_out)} held out"


def gpu_memory() -> int | None:
    """Return the memory of the first GPU in bytes, or None if there is no GPU."""
    return torch.cuda.get_device_properties(0).total_memory if uses_cuda() else None


def start_summary(start: RunStart) -> str:
    """Describe the start of the run for `--check`: a new run, a resumed run, or no start because it has finished."""
    if start.is_finished:
        return f"finished run (step {start.step}): nothing to do"
    return f"continues after step {start.step} from {start.checkpoint}" if start.checkpoint else "a new run"


def rewards_without_gpu(recipe: Recipe) -> list[str]:
    """Return the names of the rewards that need a GPU if this machine has none. Otherwise returns []."""
    reward = recipe.all_reward_settings
    return [] if reward is None or is_accelerator_present() else [f.name for f in reward.functions if f.uses_gpu]


def check_spawned_rewards(recipe: Recipe) -> None:
    """Start the reward service and stop it again, to detect a missing package or model before training."""
    reward = recipe.all_reward_settings
    if reward is None or not reward.spawn:
        return
    from wfm_ds.rollout.rewards import RewardService

    with tempfile.TemporaryDirectory(prefix="wfm-check-") as folder, RewardService(reward, Path(folder)):
        pass
