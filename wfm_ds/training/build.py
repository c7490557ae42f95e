"""Setup of a diffusion training run: engine, caches, data sources and the training loop."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm, build_rl, build_supervised, engine_policies
from wfm_ds.data.datasets import (
    TrainingData,
    batch_source,
    buckets_of,
    inputs_of,
    log_rejected,
    readable,
    trains_on_data,
)
from wfm_ds.data.prompts import PromptOrder
from wfm_ds.data.replica import chosen_once
from wfm_ds.data.shared import read_on_main
from wfm_ds.data.spread import SpreadTable
from wfm_ds.distributed.lifecycle import StopFlag, seconds_since_start
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.conditional_frames import padded
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.monitoring.trackers.choice import open_trackers
from wfm_ds.recipe.derived import Derived, derive
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.choosing import ChoosingSource
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_ds.rollout.groups import PairGroups, PromptGroups, SpreadGroups
from wfm_ds.rollout.rewards import RewardClient, RewardService
from wfm_ds.rollout.source import async_source
from wfm_ds.rollout.trajectories import Trajectories
from wfm_ds.run.folder import Start
from wfm_ds.run.initial_lora import initial_lora
from wfm_ds.run.job import Job
from wfm_ds.run.model import check_attention, load_model
from wfm_ds.training.caches import latent_cache
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.first_frames import first_frames
from wfm_ds.training.preflight import counted, preflight
from wfm_ds.training.rl import RlLoop
from wfm_ds.training.sft import SftLoop, ValidationLoss, clean_latents
from wfm_ds.training.texts_ahead import texts_of
from wfm_ds.training.validation import Validator

if TYPE_CHECKING:
    from torch import Tensor

    from wfm_ds.data.reading import TrainingSample
    from wfm_ds.rollout.base import Source
    from wfm_ds.rollout.groups import GroupSource
    from wfm_ds.run.mirror import Mirror

log = logging.getLogger(__name__)

Advised = Callable[[Callable[[], str | None]], contextlib.AbstractContextManager[None]]
DiffusionLoop = RlLoop | SftLoop


def freeze_base(model: DiffusionModel, recipe: Recipe) -> None:
    """Tell the model which layers are not trained. Call before it encodes any text."""
    if recipe.lora is not None:
        model.freeze_all_but(recipe.lora.trained_layers(model.default_lora_targets))


def build_engine(
    model: DiffusionModel,
    recipe: Recipe,
    derived: Derived,
    world: World,
    policies: frozenset[str],
    start: Mapping[str, Tensor] | None = None,
) -> DenoiserEngine:
    """Wrap the model's denoiser in an engine. All later forward passes go through the engine.

    adapter_tensors: initial values of the adapter.
    """
    freeze_base(model, recipe)
    engine = DenoiserEngine.build(
        model.denoiser,
        recipe,
        world,
        lora_targets=model.default_lora_targets,
        policies=policies,
        accumulation=max(derived.accumulation, len(model.sigma_ranges)),  # a micro-batch has one expert
        total_updates=derived.total_updates,
        block_classes=model.block_classes,
        frozen=model.frozen_names(),
        start=start,
        part_of=model.part_of,
    )
    model.denoiser = engine.forward_module
    return engine


def open_job(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    model: DiffusionModel,
    data: TrainingData,
    start: Start,
    mirror: Mirror | None,
    resources: ExitStack,
) -> Job:
    """Build engine, caches and monitor. `resources` closes the monitor. Collective."""
    derived = derive(recipe, world.size)
    world.checked(lambda: freeze_base(model, recipe))
    texts = texts_of(recipe, model, data, derived, world)  # before the engine, while the denoiser is not on the GPU
    policies = engine_policies(recipe)
    first = None if start.checkpoint else world.checked(lambda: initial_lora(recipe, model))
    engine = world.checked(lambda: build_engine(model, recipe, derived, world, policies, first))
    latents = world.checked(lambda: latent_cache(recipe, model))
    resumed_at = start.step * derived.updates_per_step if start.checkpoint else None
    trackers = world.checked(lambda: open_trackers(recipe, resumed_at), on="main")
    monitor = Monitor(
        recipe.run.output_dir,
        is_main=world.is_main,
        console=recipe.logging.console,
        total_steps=recipe.run.steps,
        unit="videos" if model.video and recipe.sampling.num_frames > 1 else "images",
        trackers=trackers or (),
    )
    resources.callback(monitor.close)
    if world.is_main:
        log_rejected(data)
    return Job(
        recipe=recipe,
        derived=derived,
        world=world,
        stop=stop,
        model=model,
        engine=engine,
        texts=texts,
        latents=latents,
        monitor=monitor,
        mirror=mirror,
    )


def prepare(
    recipe: Recipe, world: World, stop: StopFlag, advised: Advised
) -> Callable[[Start, Mirror | None, ExitStack], DiffusionLoop]:
    """Check the recipe and load data and model, before anything is written. Collective.

    Returns `build_diffusion_loop` with all arguments except the last three.
    """
    log.info("reading data %s", recipe.data.path)
    data = read_on_main(world, lambda: preflight(recipe, world.size))
    log.info("%s", counted(recipe, data))

    def load_with_advice() -> DiffusionModel:
        with advised(lambda: "start"):
            return load_model(recipe, world.device)

    log.info("loading model %s", recipe.model.path)
    model: DiffusionModel = world.checked(load_with_advice)
    log.info("model loaded, %.0f s after the start", seconds_since_start())
    world.checked(lambda: initial_lora(recipe, model))  # raises errors before anything is written
    world.checked(lambda: check_attention(recipe, model, world.device))
    texts = [prompt.text for prompt in (*data.prompts, *data.shown)]
    world.checked(lambda: model.check_prompts(texts[world.rank :: world.size]))
    return functools.partial(build_loop, recipe, world, stop, model, data)


def build_loop(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    model: DiffusionModel,
    data: TrainingData,
    start: Start,
    mirror: Mirror | None,
    resources: ExitStack,
) -> DiffusionLoop:
    """Build the recipe's training loop. `resources` closes what it opens. Collective."""
    algorithm = rl_algorithm(recipe, model)
    endpoint = resources.enter_context(reward_endpoint(recipe, world))  # rewards load while the engine is built
    job = open_job(recipe, world, stop, model, data, start, mirror, resources)
    exporter, checkpoints = Exporter(job), Checkpoints(job)
    if algorithm is None:
        return supervision(job, data, exporter, checkpoints, endpoint, resources)
    return reinforcement(job, algorithm, data, exporter, checkpoints, endpoint, resources)


@contextlib.contextmanager
def reward_endpoint(recipe: Recipe, world: World) -> Iterator[str | None]:
    """Yield the address of the reward service on every rank: the recipe's, or one that rank 0 starts and stops."""
    reward = recipe.scoring
    if reward is None or reward.endpoint is not None:
        yield reward.endpoint if reward else None
        return
    service = world.checked(lambda: RewardService(reward, recipe.run.output_dir / "reward"), on="main")
    try:
        yield world.broadcast(service.endpoint if service is not None else None)
    finally:
        if service is not None:
            service.stop()


def rl_algorithm(recipe: Recipe, model: DiffusionModel) -> RlAlgorithm | None:
    """Build the RL algorithm on the rollout grid; None for supervised training."""
    return build_rl(recipe, model.rollout_sigmas(recipe.sampling), model) if recipe.is_rl else None


def supervision(
    job: Job,
    data: TrainingData,
    exporter: Exporter,
    checkpoints: Checkpoints,
    endpoint: str | None,
    resources: contextlib.ExitStack,
) -> SftLoop:
    recipe, world = job.recipe, job.world
    buckets, inputs = buckets_of(recipe, job.model), inputs_of(recipe, job.model, data)
    source = batch_source(
        recipe,
        world,
        data,
        buckets,
        global_batch=job.derived.samples_per_step,
        unit=recipe.engine.micro_batch_size,
        cached=job.cached_latents,
        inputs=inputs,
    )
    resources.callback(source.close)
    num_images, num_samples = recipe.validation.num_images, data.num_samples
    held_out = chosen_once(
        world,
        data.held_out,
        lambda: readable(
            data.held_out, recipe, buckets, num_images, whole=num_samples, what="samples held out", inputs=inputs
        ),
    )
    indices = world.checked(lambda: [buckets.index_of(sample.media) for sample in held_out], on="leaders")
    framings = [buckets.framings[index] for index in world.share(indices)]
    algorithm = build_supervised(recipe)
    judges = judge_client(job, endpoint, resources)
    loss = ValidationLoss(job, algorithm, held_out, framings) if held_out else None
    shown, frames = first_frames(job, data)
    validator = Validator(job, shown, judges=judges, loss=loss, frames=frames)
    return SftLoop(job, algorithm, source, validator, exporter, checkpoints)


def reinforcement(
    job: Job,
    algorithm: RlAlgorithm,
    data: TrainingData,
    exporter: Exporter,
    checkpoints: Checkpoints,
    endpoint: str | None,
    resources: ExitStack,
) -> RlLoop:
    recipe, reward = job.recipe, job.recipe.rl.reward
    assert endpoint is not None
    rewards = reward_client(job, endpoint, reward, f"rank{job.world.rank}", resources)
    groups = group_source(job, algorithm, data, resources)
    source: Source
    if recipe.is_async:
        source = async_source(job, groups, algorithm, endpoint, resources)
    elif recipe.chooses_samples:
        assert isinstance(groups, PromptGroups | SpreadGroups), "the recipe needs data.kind: prompts"
        source = ChoosingSource(job, groups, rewards, algorithm)
    else:
        source = ColocatedSource(job, groups, rewards, algorithm)
    plan = algorithm.plan if recipe.validation.rollout_correlation else None
    shown, frames = first_frames(job, data)
    judges = judge_client(job, endpoint, resources)
    validator = Validator(job, shown, rewards=rewards, judges=judges, rollout_plan=plan, frames=frames)
    return RlLoop(job, algorithm, source, validator, exporter, checkpoints)


def reward_client(
    job: Job, endpoint: str, reward: RewardRecipe, name: str, resources: contextlib.ExitStack
) -> RewardClient:
    run = job.recipe.run.output_dir.name
    client: RewardClient = job.world.checked(lambda: RewardClient(endpoint, reward, run=run, client=name))
    resources.callback(client.close)
    return client


def judge_client(job: Job, endpoint: str | None, resources: contextlib.ExitStack) -> RewardClient | None:
    """Connect to the held-out rewards; None if the recipe has none."""
    judging = job.recipe.judging
    if judging is None:
        return None
    assert endpoint is not None
    return reward_client(job, endpoint, judging, f"rank{job.world.rank}-judges", resources)


def group_source(job: Job, algorithm: RlAlgorithm, data: TrainingData, resources: ExitStack) -> GroupSource:
    """Build the source of rollout groups: from the data's images and videos, or from prompts."""
    recipe, seed = job.recipe, job.recipe.run.seed
    num_groups = recipe.rl.rollout.prompts_per_step
    if not data.samples and recipe.data.choose == "reward_std":
        table = SpreadTable(len(data.prompts), floor=recipe.data.choose_floor, memory=recipe.data.choose_memory)
        ahead = recipe.rl.rollout.max_staleness if recipe.is_async else 0
        return SpreadGroups(data.prompts, num_groups, table=table, seed=seed, ahead=ahead)
    if not data.samples:
        return PromptGroups(PromptOrder(data.prompts, seed=seed, shuffle=recipe.data.shuffle), num_groups)
    inputs = inputs_of(recipe, job.model, data)
    # The rollouts and the data of a step have one size.
    source = batch_source(
        recipe,
        job.world,
        data,
        buckets_of(recipe, job.model),
        global_batch=num_groups,
        unit=num_groups,
        cached=job.cached_latents,
        inputs=inputs,
    )
    resources.callback(source.close)
    num_frames = algorithm.settings.num_conditional_frames

    def encode_batch(samples: Sequence[TrainingSample]) -> Tensor:
        latents = clean_latents(job, samples)
        return padded(latents, job.sampler.latent_shape[1]) if num_frames[1] else latents

    frame_range = job.model.pinned(num_frames)
    encode = encode_batch if frame_range[1] or trains_on_data(recipe) else None
    return PairGroups(job, source, encode, frame_range, Trajectories(recipe, data.actions))
