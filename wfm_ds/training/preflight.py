"""Checks of a recipe's model, data and rewards. A run does them before it writes files; `--check` does only them."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch

from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.data.datasets import (
    TrainingData,
    build_buckets,
    find_usable_samples,
    lerobot_sources,
    list_validation_prompts,
    load_data,
)
from wfm_ds.data.hf_stream import HfStream
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.lerobot import check_video_files
from wfm_ds.distributed.accelerator import is_accelerator_present, ranks_per_node, uses_cuda
from wfm_ds.engine.optional_packages import require_packages
from wfm_ds.engine.zero_values import check_zero_values
from wfm_ds.errors import ModelError, RecipeError
from wfm_ds.evaluation.paired_statistics import MIN_PROMPTS
from wfm_ds.export.pipeline_folder import INDEX_FILE
from wfm_ds.memory.advice import memory_verdict
from wfm_ds.memory.estimate import MemoryEstimate, estimate_memory
from wfm_ds.models import registry
from wfm_ds.models.assets.few_steps import find_few_steps, read_few_steps
from wfm_ds.models.assets.hub import display_name
from wfm_ds.models.assets.loading import read_json, select_device
from wfm_ds.monitoring.trackers import require_trackers
from wfm_ds.recipe.deepspeed import build_deepspeed_config
from wfm_ds.recipe.run_sizes import derive_run_sizes, num_replicas
from wfm_ds.recipe.sampling import CPS_EVAL_NOISE
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.histories import check_references, choose_history_layout, extend_for_history, history_warnings
from wfm_ds.runs.check_report import CheckReport, gpu_memory, start_summary
from wfm_ds.runs.model_loading import choose_attention, find_family, load_model
from wfm_ds.runs.model_revision import pin_commit
from wfm_ds.runs.output_folder import find_run_start
from wfm_ds.training.caches import keeps_text_encoders
from wfm_ds.training.early_checks import check_workers
from wfm_ds.training.reward_alarm import RECOMMENDED_PROMPTS
from wfm_ds.training.reward_checks import check_rewards

log = logging.getLogger(__name__)

NUM_CHECKED_SAMPLES = 32  # maximum number of samples that --check reads
SERVICE_WAIT_S = 8.0  # how long --check waits for a reward service; a run waits longer: the service may start later
MIN_PROMPT_DRAWS = 3  # minimum draws per prompt in a run; with fewer, reward stds of most prompts are unreliable


def limit_service_wait(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe that waits at most SERVICE_WAIT_S seconds for the service at reward.endpoint."""
    reward = recipe.reward
    if reward is None or reward.endpoint is None:
        return recipe
    reward = reward.model_copy(update={"start_timeout_s": min(SERVICE_WAIT_S, reward.start_timeout_s)})
    return recipe.model_copy(update={"reward": reward})


def check_and_load_data(recipe: Recipe, world_size: int) -> TrainingData:
    """Run the quick checks and load the data. Writes nothing."""
    check_rank_count(recipe, world_size, ranks_per_node(world_size))
    check_zero_values(recipe)
    require_packages(recipe)
    require_trackers(recipe)
    find_family(recipe)
    data = load_data(recipe)
    recipe.algorithm.check_prompts(data.prompts)
    for warning in [
        *recipe.algorithm.list_warnings(),
        *prompt_choice_warnings(recipe, data),
        *validation_reward_warnings(recipe, data),
        *few_step_warnings(recipe),
        *spread_warnings(recipe),
        *noisy_student_warnings(recipe),
        *history_warnings(recipe),
    ]:
        log.warning(warning)
    if recipe.is_async:
        check_workers(recipe)
    if recipe.all_reward_settings is not None:
        check_references(recipe)
        check_rewards(recipe, data)
    return data


def check_rank_count(recipe: Recipe, world_size: int, num_local_ranks: int) -> None:
    """Raise RecipeError if `world_size` ranks, `num_local_ranks` on each host, cannot train the recipe."""
    num_replicas(recipe, world_size, ranks_per_node=num_local_ranks)
    check_hosts(recipe, world_size, num_local_ranks)
    derived = derive_run_sizes(recipe, world_size)
    build_deepspeed_config(
        recipe,
        accumulation=derived.accumulation,
        policies=engine_policy_copies(recipe),
        world_size=world_size,
        ranks_per_node=num_local_ranks,
    )


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

    Assumes that every machine has as many GPUs as this one.
    """
    num_gpus = torch.cuda.device_count() if uses_cuda() else 0
    if num_gpus == 0:  # the check may be for another machine
        return []
    try:
        check_hosts(recipe, world_size, min(num_gpus, world_size))
    except RecipeError as error:
        return [f"this machine has {num_gpus} GPUs. On several hosts: {error}"]
    return []


def draws_per_prompt(recipe: Recipe, data: TrainingData) -> float:
    return recipe.run.steps * recipe.rl.rollout.prompts_per_step / len(data.prompts)


def prompt_choice_warnings(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return a warning if the run chooses prompts by reward std but draws each prompt too rarely to measure the std.

    "Too rarely" means fewer than MIN_PROMPT_DRAWS draws per prompt on average.
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
        available = len(list_validation_prompts(recipe, data.prompts, data.held_out or data.samples))
        if num_prompts < available:
            advice = f"Set validation.num_prompts to {min(available, RECOMMENDED_PROMPTS)}"
        else:
            advice = f"Add prompts to the data or to validation.prompts, until there are {RECOMMENDED_PROMPTS}"
        warnings.append(f"validation.held_out_rewards score only {num_prompts} prompts: {effect}. {advice}")
    if recipe.validation.every == 0:
        warnings.append(
            "validation.held_out_rewards are only evaluated at the end, too late for an alarm: set validation.every"
        )
    return warnings


def few_step_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if flow matching would undo the distillation of the model or of the initial LoRA."""
    if not recipe.algorithm.matches_flow:
        return []
    folder = registry.locate_pipeline(recipe.model.path, recipe.model.family, recipe.model.revision)
    start, family = None if recipe.lora is None else recipe.lora.init_from, find_family(recipe)
    if find_few_steps(recipe.model.path, folder, family) is not None:
        what = f"model.path {recipe.model.path}"
    elif start is not None and read_few_steps(
        start if start.is_dir() else start.parent, family, read_json(folder / INDEX_FILE)
    ):
        what = f"lora.init_from {start}"
    else:
        return []
    return [
        f"{what} was distilled to few steps, which {recipe.algorithm.name} undoes: train the base model first, then "
        "distill the result with algorithm dmd2 and a teacher with weights: init (docs/few_steps.md)"
    ]


def spread_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if guided teachers may make a prompt's samples similar and rollout/spread may not show this."""
    guided = any(teacher.guidance_scale > 1 for teacher in recipe.algorithm.list_teachers())
    if not guided or recipe.rl.rollout.group_size > 1:
        return []
    return [
        "guidance of the teacher makes the samples of a prompt more similar, but with rollout.group_size 1 "
        "rollout/spread measures this only if a step has a prompt twice: set group_size to 2 and halve prompts_per_step"
    ]


def noisy_student_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if a student is trained on rollouts with added noise, but evaluated and exported without it."""
    sampling = recipe.sampling
    if not recipe.algorithm.list_teachers() or not sampling.is_stochastic or sampling.eval_solver == "cps":
        return []
    advice = (
        "compare val/reward with reward, lower sampling.noise_level, or use solver: ode (with algorithm.reward.loss: "
        "diffusion_nft)"
    )
    if (sampling.solver, sampling.noise_level) == ("cps", CPS_EVAL_NOISE):
        advice = "set sampling.eval_solver: cps and eval_grid: even"
    return [
        f"sampling.solver {sampling.solver} adds noise in the rollouts, but validation samples and exports use Euler "
        f"steps, which may not show what the student learns: {advice}"
    ]


def check_run(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> CheckReport:
    """Check data, model, rewards and memory of a run with `world_size` ranks. Raises UserError if it cannot run."""
    from wfm_ds.training.language_builder import check_language_run

    check_recipe = check_language_run if recipe.algorithm.trains_language else check_diffusion_run
    return check_recipe(recipe, world_size, overwrite=overwrite)


def check_diffusion_run(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> CheckReport:
    """Check a diffusion recipe and return the report of `--check`. Raises UserError if a check fails."""
    recipe = pin_commit(recipe, overwrite=overwrite)
    start = find_run_start(recipe, world_size, overwrite=overwrite)
    data = check_and_load_data(limit_service_wait(recipe), world_size)
    check_video_files(lerobot_sources(recipe))
    model = load_model(recipe, torch.device("cpu"))
    kernel = choose_attention(recipe, model, select_device(None))
    samples = data.samples
    if recipe.data.streaming:
        samples = [row.sample for row in HfStream(recipe.data).read(NUM_CHECKED_SAMPLES)]
    num_samples, inputs = len(samples) + len(data.held_out), InputReader.from_recipe(recipe, model, data.actions)
    buckets, layout = build_buckets(recipe, model), choose_history_layout(recipe, model)
    buckets, inputs = extend_for_history(layout, buckets, inputs, data.actions)
    find_usable_samples(samples, recipe, buckets, NUM_CHECKED_SAMPLES, dataset_size=num_samples, inputs=inputs)
    for warning in host_warnings(recipe, world_size):
        log.warning(warning)
    require_reachable_rewards(recipe)
    if gpu_rewards := rewards_without_gpu(recipe):  # the check may be for another machine
        log.warning("the rewards were not started: this machine has no GPU for %s", ", ".join(gpu_rewards))
    else:
        check_spawned_rewards(recipe)
    keeps_encoders = keeps_text_encoders(recipe, model, data, world_size)
    sizes: MemoryEstimate | None = None
    try:
        sizes = estimate_memory(recipe, model, world_size, keeps_encoders=keeps_encoders)
        verdict = memory_verdict(recipe, sizes, gpu_memory())
    except ModelError as error:
        verdict = f"  memory not estimated: {error}"
    choice = "" if recipe.data.choose == "even" else f", by reward_std, {draws_per_prompt(recipe, data):.3g} draws each"
    number = "a stream" if recipe.data.streaming else len(data.samples)
    counts = {"samples": f"{number} to train on, {len(data.held_out)} held out"}
    if recipe.is_rl:
        counts = {"prompts": f"{len(data.prompts)}{choice}"}
    facts = {
        "recipe": f"{recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}",
        "model": display_name(model.path),
        **teacher_facts(recipe),
        "attention": kernel,
        **counts,
        "output": start_summary(start),
    }
    return CheckReport(facts=facts, run_sizes=derive_run_sizes(recipe, world_size), memory=sizes, verdict=verdict)


def teacher_facts(recipe: Recipe) -> dict[str, str]:
    teachers = [f"{one.weights}, guidance {one.guidance_scale:g}" for one in recipe.algorithm.list_teachers()]
    return {"teacher": "; ".join(teachers)} if teachers else {}


def data_summary(recipe: Recipe, data: TrainingData) -> str:
    if recipe.is_rl:
        return f"{len(data.prompts)} prompts"
    number = "a stream of" if recipe.data.streaming else len(data.samples)
    return f"{number} samples to train on, {len(data.held_out)} held out"


def rewards_without_gpu(recipe: Recipe) -> list[str]:
    """Return the names of the rewards that need a GPU although this machine has none."""
    reward = recipe.all_reward_settings
    return [] if reward is None or is_accelerator_present() else [f.name for f in reward.functions if f.uses_gpu]


def require_reachable_rewards(recipe: Recipe) -> None:
    """Raise RewardError if a server that a reward sends requests to cannot be reached."""
    reward = recipe.all_reward_settings
    if reward is None or not reward.spawn:
        return
    from wfm_reward import registry

    for function in reward.functions:
        registry.create_reward(function.name, function.device, function.options).check_reachable()


def check_spawned_rewards(recipe: Recipe) -> None:
    """Start the reward service and stop it again, to detect a missing package or model before training."""
    reward = recipe.all_reward_settings
    if reward is None or not reward.spawn:
        return
    from wfm_ds.rollout.reward_service import RewardService

    with tempfile.TemporaryDirectory(prefix="wfm-check-") as folder, RewardService(reward, Path(folder)):
        pass
