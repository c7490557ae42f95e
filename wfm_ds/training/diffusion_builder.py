"""Builds a diffusion training run: engine, caches, data sources and training loop."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from wfm_ds.algorithms import RlAlgorithm, build_rl_algorithm, build_supervised_algorithm, engine_policy_copies
from wfm_ds.data.batch_reader import choose_on_leader
from wfm_ds.data.broadcast import read_on_main
from wfm_ds.data.datasets import (
    TrainingData,
    build_batch_source,
    build_buckets,
    find_usable_samples,
    log_rejected,
    trains_on_data,
)
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.order import PromptOrder
from wfm_ds.data.prompt_weights import RewardStdTable
from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.distributed.lifecycle import StopFlag, seconds_since_start
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.engine.optimizer import ExtraAdapter
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.captioned_groups import CaptionedGroups
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_ds.rollout.groups import PromptGroups, RewardStdGroups
from wfm_ds.rollout.histories import HistoryLayout, choose_history_layout, extend_for_history
from wfm_ds.rollout.remote.async_source import start_async_source
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.selective_source import SelectiveSource
from wfm_ds.rollout.trajectories import CounterfactualTrajectories
from wfm_ds.runs.job import Job, open_monitor
from wfm_ds.runs.loras import load_initial_lora, load_teachers
from wfm_ds.runs.model_loading import choose_attention, load_model
from wfm_ds.runs.output_folder import RunStart
from wfm_ds.training.caches import load_clean_latents, open_latent_cache, precompute_texts
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.preflight import check_and_load_data, data_summary
from wfm_ds.training.rl import RlLoop
from wfm_ds.training.sft import SftLoop, ValidationLoss
from wfm_ds.training.validation import Validator
from wfm_ds.training.validation_frames import load_validation_samples

if TYPE_CHECKING:
    from torch import Tensor

    from wfm_ds.data.batch_reader import TrainingSample
    from wfm_ds.rollout.groups import GroupSource, RolloutSource
    from wfm_ds.runs.mirror import Mirror

log = logging.getLogger(__name__)

OomAdvice = Callable[[Callable[[], str | None]], contextlib.AbstractContextManager[None]]
DiffusionLoop = RlLoop | SftLoop


def mark_frozen_layers(model: DiffusionModel, recipe: Recipe) -> None:
    """Tell the model which layers LoRA trains. Call this before the model encodes any text."""
    if recipe.lora is not None:
        model.prepare_for_lora(recipe.lora.trainable_layers(model.default_lora_targets))


def build_diffusion_engine(
    model: DiffusionModel,
    recipe: Recipe,
    derived: RunSizes,
    world: World,
    policies: frozenset[str],
    adapter_tensors: Mapping[str, Tensor] | None = None,
    teachers: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> DenoiserEngine:
    """Wrap the model's denoiser in an engine. All later forward passes must use the engine.

    policies: names of the weight copies that the engine keeps.
    adapter_tensors: {name: initial LoRA tensor}, or None to create new adapters.
    teachers: {policy: {name: LoRA tensor}} of the teachers that have a LoRA.
    """
    mark_frozen_layers(model, recipe)
    engine = DenoiserEngine.build(
        model.denoiser,
        recipe,
        world,
        lora_targets=model.default_lora_targets,
        policies=policies,
        accumulation=max(derived.accumulation, len(model.sigma_ranges)),  # a micro-batch has one expert
        total_updates=derived.total_updates,
        block_classes=model.block_classes,
        frozen=model.find_unused_parameters(),
        initial_adapter=adapter_tensors,
        extra_adapters=list_extra_adapters(recipe),
        frozen_adapters=teachers,
        # Counting takes a second. Without a peak, nobody needs the FLOPs of a CPU.
        count_flops=world.device.type != "cpu" or recipe.logging.peak_tflops is not None,
        find_part=model.parameter_component,
    )
    model.denoiser = engine.forward_module
    return engine


def list_extra_adapters(recipe: Recipe) -> dict[str, ExtraAdapter]:
    """Return the adapters that are trained in addition to the exported adapter."""
    return {
        name: ExtraAdapter(lr=settings.lr or recipe.optimizer.lr, betas=settings.betas)
        for name, settings in recipe.algorithm.extra_adapters.items()
    }


def build_job(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    model: DiffusionModel,
    data: TrainingData,
    start: RunStart,
    mirror: Mirror | None,
    resources: ExitStack,
) -> Job:
    """Build the engine, caches and monitor of a diffusion run. All ranks must call this.

    resources: ExitStack that closes the monitor.
    """
    derived = derive_run_sizes(recipe, world.size)
    world.run_checked(lambda: mark_frozen_layers(model, recipe))
    # Encode texts before the engine moves the denoiser to the GPU.
    texts = precompute_texts(recipe, model, data, derived, world)
    policies = engine_policy_copies(recipe)
    first = None if start.checkpoint else world.run_checked(lambda: load_initial_lora(recipe, model))
    teachers = world.run_checked(lambda: load_teachers(recipe, model))
    engine = world.run_checked(lambda: build_diffusion_engine(model, recipe, derived, world, policies, first, teachers))
    latents = world.run_checked(lambda: open_latent_cache(recipe, model))
    resumed_at = start.step * derived.updates_per_step if start.checkpoint else None
    unit = "videos" if model.is_video and recipe.sampling.num_frames > 1 else "images"
    monitor = open_monitor(recipe, world, resumed_at, unit, resources)
    if world.is_main:
        log_rejected(data)
    return Job(
        recipe=recipe,
        run_sizes=derived,
        world=world,
        stop_flag=stop,
        model=model,
        engine=engine,
        text_cache=texts,
        latent_cache=latents,
        monitor=monitor,
        mirror=mirror,
    )


def prepare_diffusion_run(
    recipe: Recipe, world: World, stop: StopFlag, oom_advice: OomAdvice
) -> Callable[[RunStart, Mirror | None, ExitStack], DiffusionLoop]:
    """Check the recipe, load data and model, and return a function that builds the training loop.

    All ranks must call this. Nothing is written before the returned function is called.
    """
    log.info("reading data %s", recipe.data.path)
    data = read_on_main(world, lambda: check_and_load_data(recipe, world.size))
    log.info("%s", data_summary(recipe, data))

    def load_with_advice() -> DiffusionModel:
        with oom_advice(lambda: "start"):
            return load_model(recipe, world.device)

    log.info("loading model %s", recipe.model.path)
    model: DiffusionModel = world.run_checked(load_with_advice)
    log.info("model loaded, %.0f s after the start", seconds_since_start())
    world.run_checked(lambda: load_initial_lora(recipe, model))  # raises errors before anything is written
    world.run_checked(lambda: load_teachers(recipe, model))
    world.run_checked(lambda: choose_attention(recipe, model, world.device))
    texts = [prompt.text for prompt in (*data.prompts, *data.validation_prompts)]
    world.run_checked(lambda: model.check_prompts(texts[world.rank :: world.size]))
    return functools.partial(build_diffusion_loop, recipe, world, stop, model, data)


def build_diffusion_loop(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    model: DiffusionModel,
    data: TrainingData,
    start: RunStart,
    mirror: Mirror | None,
    resources: ExitStack,
) -> DiffusionLoop:
    """Build the recipe's training loop. All ranks must call this.

    resources: ExitStack that closes everything that this function opens.
    """
    algorithm = make_rl_algorithm(recipe, model)
    endpoint = resources.enter_context(provide_reward_endpoint(recipe, world))  # rewards load while the engine is built
    job = build_job(recipe, world, stop, model, data, start, mirror, resources)
    exporter, checkpoints = Exporter(job), Checkpoints(job)
    if algorithm is None:
        return build_sft_loop(job, data, exporter, checkpoints, endpoint, resources)
    return build_rl_loop(job, algorithm, data, exporter, checkpoints, endpoint, resources)


@contextlib.contextmanager
def provide_reward_endpoint(recipe: Recipe, world: World) -> Iterator[str | None]:
    """Yield the address of the reward service, or None if the recipe has no rewards. All ranks must call this.

    If reward.endpoint is not set, rank 0 starts a reward service and stops it when the context ends.
    """
    reward = recipe.all_reward_settings
    if reward is None or reward.endpoint is not None:
        yield reward.endpoint if reward else None
        return

    def start() -> RewardService:
        return RewardService(reward, recipe.run.output_dir / "reward", ranks_per_node(world.size))

    service: RewardService | None = world.run_checked(start, on="main")
    try:
        yield world.broadcast(service.endpoint if service is not None else None)
    finally:
        if service is not None:
            service.stop()


def make_rl_algorithm(recipe: Recipe, model: DiffusionModel) -> RlAlgorithm | None:
    """Build the recipe's RL algorithm. Returns None for supervised training."""
    return build_rl_algorithm(recipe, model.rollout_sigmas(recipe.sampling), model) if recipe.is_rl else None


def build_sft_loop(
    job: Job,
    data: TrainingData,
    exporter: Exporter,
    checkpoints: Checkpoints,
    endpoint: str | None,
    resources: contextlib.ExitStack,
) -> SftLoop:
    recipe, world = job.recipe, job.world
    buckets, inputs = build_buckets(recipe, job.model), InputReader.from_recipe(recipe, job.model, data.actions)
    source = build_batch_source(
        recipe,
        world,
        data,
        buckets,
        global_batch=job.run_sizes.samples_per_step,
        unit=recipe.engine.micro_batch_size,
        cached_latents=job.read_cached_latents,
        inputs=inputs,
    )
    resources.callback(source.close)
    num_images, num_samples = recipe.validation.num_images, data.num_samples
    held_out = choose_on_leader(
        world,
        data.held_out,
        lambda: find_usable_samples(
            data.held_out, recipe, buckets, num_images, dataset_size=num_samples, what="samples held out", inputs=inputs
        ),
    )
    indices = world.run_checked(lambda: [buckets.choose_bucket(sample.media) for sample in held_out], on="leaders")
    framings = [buckets.framings[index] for index in world.broadcast_in_replica(indices)]
    algorithm = build_supervised_algorithm(recipe)
    judges = connect_reward_client(job, endpoint, recipe.held_out_reward_settings, "-judges", resources)
    loss = ValidationLoss(job, algorithm, held_out, framings) if held_out else None
    samples = load_validation_samples(job, data, needs_recordings=judges is not None and bool(judges.reference_rewards))
    validator = Validator(job, samples, held_out_rewards=judges, loss=loss)
    return SftLoop(job, algorithm, source, validator, exporter, checkpoints)


def build_rl_loop(
    job: Job,
    algorithm: RlAlgorithm,
    data: TrainingData,
    exporter: Exporter,
    checkpoints: Checkpoints,
    endpoint: str | None,
    resources: ExitStack,
) -> RlLoop:
    recipe, reward = job.recipe, job.recipe.reward
    rewards = connect_reward_client(job, endpoint, reward, "", resources)
    layout = job.world.run_checked(lambda: choose_history_layout(recipe, job.model))
    groups = build_group_source(job, algorithm, data, layout, resources)
    source: RolloutSource
    if recipe.is_async:
        assert endpoint is not None
        source = start_async_source(job, groups, algorithm, endpoint, resources, layout)
    elif recipe.selects_samples:
        assert rewards is not None
        assert isinstance(groups, PromptGroups | RewardStdGroups), "the recipe needs data.kind: prompts"
        source = SelectiveSource(job, groups, rewards, algorithm)
    else:
        source = ColocatedSource(job, groups, rewards, algorithm, layout)
    plan = algorithm.plan if recipe.validation.rollout_correlation else None
    judges = connect_reward_client(job, endpoint, recipe.held_out_reward_settings, "-judges", resources)
    needs_recordings = any(client is not None and client.reference_rewards for client in (rewards, judges))
    samples = load_validation_samples(job, data, needs_recordings=needs_recordings)
    validator = Validator(job, samples, rewards=rewards, held_out_rewards=judges, rollout_plan=plan)
    return RlLoop(job, algorithm, source, validator, exporter, checkpoints)


def connect_reward_client(
    job: Job, endpoint: str | None, reward: RewardRecipe | None, suffix: str, resources: contextlib.ExitStack
) -> RewardClient | None:
    """Return a connected client for these rewards, or None if `reward` is None. suffix: end of the client's name."""
    if reward is None:
        return None
    assert endpoint is not None
    run, name = job.recipe.run.output_dir.name, f"rank{job.world.rank}{suffix}"
    client: RewardClient = job.world.run_checked(lambda: RewardClient(endpoint, reward, run=run, client=name))
    resources.callback(client.close)
    return client


def build_group_source(
    job: Job, algorithm: RlAlgorithm, data: TrainingData, layout: HistoryLayout | None, resources: ExitStack
) -> GroupSource:
    """Build the source of rollout groups from a list of prompts or from captioned images and videos."""
    recipe, seed = job.recipe, job.recipe.run.seed
    num_groups = recipe.rl.rollout.prompts_per_step
    if not data.samples and recipe.data.choose == "reward_std":
        table = RewardStdTable(len(data.prompts), floor=recipe.data.choose_floor, memory=recipe.data.choose_memory)
        ahead = recipe.rl.rollout.max_staleness if recipe.is_async else 0
        return RewardStdGroups(data.prompts, num_groups, table=table, seed=seed, steps_ahead=ahead)
    if not data.samples:
        return PromptGroups(PromptOrder(data.prompts, seed=seed, shuffle=recipe.data.shuffle), num_groups)
    inputs = InputReader.from_recipe(recipe, job.model, data.actions)
    buckets, keeps_recordings = build_buckets(recipe, job.model), layout is not None and layout.keeps_recordings
    num_pixel_frames = buckets.framings[0].num_frames  # conditioning frames only, or a whole clip
    buckets, inputs = extend_for_history(layout, buckets, inputs, data.actions)
    num_frames = algorithm.settings.conditioning_frame_range
    frame_range = job.model.clean_frame_range(num_frames)
    needs_latents = frame_range[1] > 0 or trains_on_data(recipe)
    # unit: all groups of a step come from one size bucket, because the rollouts of a step have one size.
    source = build_batch_source(
        recipe,
        job.world,
        data,
        buckets,
        global_batch=num_groups,
        unit=num_groups,
        cached_latents=job.read_cached_latents,
        inputs=inputs,
        reads_media=needs_latents or keeps_recordings,
    )
    resources.callback(source.close)

    def encode_batch(samples: Sequence[TrainingSample]) -> Tensor:
        if keeps_recordings:
            samples = [replace(s, pixels=None if s.frames is None else s.frames[:num_pixel_frames]) for s in samples]
        latents = load_clean_latents(job, samples)
        return pad_num_frames(latents, job.sampler.latent_shape[1]) if num_frames[1] else latents

    encode = encode_batch if needs_latents else None
    trajectories = CounterfactualTrajectories(recipe, data.actions)
    return CaptionedGroups(job, source, encode, frame_range, trajectories, layout)
