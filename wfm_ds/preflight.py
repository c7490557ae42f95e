"""What must hold before a run writes anything: model, data, rewards. Also `--check`. The output folder: output.py."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from wfm_ds.algorithms import build_rl, rl_policies
from wfm_ds.data.buckets import Size
from wfm_ds.datasets import TrainingData, buckets_of, load_data, readable
from wfm_ds.derived import derive, num_replicas
from wfm_ds.ds_config import deepspeed_config, require_idle_experts
from wfm_ds.errors import RecipeError, UserError
from wfm_ds.estimate import lora_parameters, memory_lines
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel
from wfm_ds.output import Start, find_start
from wfm_ds.pipes.sockets import check_endpoint
from wfm_ds.recipe import Recipe, RewardFunction
from wfm_ds.recipe_algorithms import DdrlAlgorithm, SftAlgorithm
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.service import endpoints, spawn_devices, trainer_keys
from wfm_ds.types import Prompt
from wfm_ds.ulysses.install import check as check_shareable
from wfm_ds.ulysses.install import check_shape
from wfm_ds.world import ranks_per_node

log = logging.getLogger(__name__)

NUM_DECODED = 32  # samples that --check looks into
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_rewards(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Known rewards that can score these prompts; a running service answers. Raises RewardError or RecipeError."""
    assert recipe.reward is not None
    video = registry.family_of(registry.resolve(recipe.model.path)).video
    for function in recipe.reward.functions:
        check_needs(function, prompts, local=recipe.reward.spawn, video=video)
    if recipe.reward.endpoint is not None:
        RewardClient(recipe.reward.endpoint, recipe.reward, run="check", client="check").close()


def check_workers(recipe: Recipe) -> None:
    """Raises RecipeError, PipeError or KeyFileError for workers that could not be started, or not be reached."""
    assert recipe.rollout is not None
    spawn_devices(recipe.rollout.devices, recipe.rollout.spawn)
    keys = trainer_keys(recipe.rollout)
    if recipe.rollout.bind != "ipc":
        for endpoint in endpoints(recipe.rollout.bind, None):
            check_endpoint(endpoint, keys=keys is not None)


def check_needs(function: RewardFunction, prompts: Sequence[Prompt], *, local: bool, video: bool) -> None:
    """`video`: whether the model makes videos. A reward of a service elsewhere may be unknown here; then the service
    itself is asked."""
    from wfm_reward import registry as rewards

    if not local and function.name not in rewards.names():
        return
    reward = rewards.describe(function.name)
    if not video and "image" not in reward.media:
        raise RecipeError(
            f"reward {function.name} scores videos, but the model makes images: choose another reward or model"
        )
    for key in reward.needs:
        lacking = [p.id for p in prompts if key not in p.metadata]
        if lacking:
            raise RecipeError(
                f"reward {function.name} needs the metadata key {key!r}, which {len(lacking)} of {len(prompts)} "
                f"prompts lack, e.g. {lacking[0]}: add it to the prompt file or choose another reward"
            )
    if local:
        rewards.create(function.name, "cpu", function.options)


def load_model(recipe: Recipe, device: torch.device, *, placed: bool = False) -> DiffusionModel:
    """The recipe's pipeline, its denoiser as it is stored until an engine places it (`placed`: on the device, for use
    without an engine), or re-initialised when the recipe trains from scratch. Raises ModelError when it cannot be
    loaded, RecipeError when the recipe's size does not fit the family, UserError when its tokens cannot be shared as
    the recipe says."""
    settings, size = recipe.model, recipe.sampling
    model = registry.load(
        settings.path,
        dtype=DTYPES[settings.dtype],
        device=device,
        max_sequence_length=settings.max_sequence_length,
        prompt_template=settings.prompt_template,
        guardrail=settings.guardrail,
        mapped=settings.denoiser_init != "random" and not placed,
    )
    try:
        model.latent_shape(size.height, size.width, size.num_frames)
    except ValueError as error:
        raise RecipeError(f"sampling: {error}") from error
    shape = model.latent_shape(size.height, size.width, size.num_frames)
    rollout_grid, _ = model.sigmas(size.steps, shape), model.sigmas(size.eval_steps, shape)
    if recipe.is_rl:
        build_rl(recipe, rollout_grid)  # raises what depends on the family's grid
    if recipe.algorithm.name == "sft":
        check_given_frames(recipe.algorithm, model, shape)
        if recipe.algorithm.flow_shift is None:
            _ = model.flow_shift  # raises where the scheduler has none
    sizes = buckets_of(recipe, model).sizes  # raises for those that the family has not
    if len(model.sigma_ranges) > 1:
        require_idle_experts(recipe)
    elif size.guidance_scale_low is not None:
        raise RecipeError(f"sampling.guidance_scale_low: {model.path} has no second expert; remove the key")
    if isinstance(recipe.algorithm, DdrlAlgorithm):
        check_given_frames(recipe.algorithm, model, shape)
        check_data_levels(recipe.algorithm, model)
    if recipe.engine.sequence_parallel > 1:
        check_shareable(model.denoiser, recipe.engine.sequence_parallel)
        check_sizes_shared(recipe, model, [(size.height, size.width), *sizes])
    if recipe.lora is not None:
        targets = recipe.lora.target_modules or model.default_lora_targets
        if lora_parameters(model.denoiser, targets, recipe.lora.rank) == 0:
            raise RecipeError(f"lora.target_modules: no linear layer of the denoiser ends with {', '.join(targets)}")
    if settings.denoiser_init == "random":
        registry.randomize(model, recipe.run.seed)
    return model


def check_sizes_shared(recipe: Recipe, model: DiffusionModel, sizes: Sequence[Size]) -> None:
    """RecipeError for one of these sizes that is too small for the ranks of a replica to share."""
    for height, width in dict.fromkeys(sizes):
        shape = model.latent_shape(height, width, recipe.sampling.num_frames)
        try:
            check_shape(model.denoiser, recipe.engine.sequence_parallel, shape)
        except UserError as error:
            whose = "sampling" if (height, width) == (recipe.sampling.height, recipe.sampling.width) else "data.buckets"
            raise RecipeError(f"{whose}: the size [{height}, {width}] cannot be shared among ranks: {error}") from error


def check_given_frames(algorithm: SftAlgorithm | DdrlAlgorithm, model: DiffusionModel, shape: Sequence[int]) -> None:
    """RecipeError for numbers of given frames that the family does not know, or that leave nothing to predict."""
    low, high = algorithm.min_num_conditional_frames, algorithm.max_num_conditional_frames
    unknown = sorted(set(range(low, high + 1)) - set(model.conditional_frames))
    if unknown:
        known = " or ".join(map(str, model.conditional_frames))
        raise RecipeError(
            f"algorithm.max_num_conditional_frames {high}: {model.family} takes {known} given latent frames; "
            f"change the range {low} to {high}"
        )
    num_frames = shape[1] if model.video else 1
    if high >= num_frames:
        raise RecipeError(
            f"algorithm.max_num_conditional_frames {high} leaves nothing to predict of {num_frames} latent frames: "
            "lower it or raise sampling.num_frames"
        )


def check_data_levels(algorithm: DdrlAlgorithm, model: DiffusionModel) -> None:
    """RecipeError where data would be noised for another expert than the rollout step that it is trained with."""
    if algorithm.data_beta > 0 and not algorithm.use_rl_sigma_and_noise and len(model.sigma_ranges) > 1:
        raise RecipeError(
            f"algorithm.use_rl_sigma_and_noise: false draws noise levels that {model.family} denoises with another "
            "expert than the rollout's: set it to true"
        )


def engine_policies(recipe: Recipe) -> frozenset[str]:
    """The copies of the weights that the engine keeps for this recipe."""
    algorithm = rl_policies(recipe) if recipe.is_rl else frozenset[str]()
    return algorithm | ({"ema"} if recipe.ema is not None else set())


def preflight(recipe: Recipe, world_size: int) -> TrainingData:
    """The data, once what can be refused cheaply was, in the order in which a user would fix it. Writes nothing."""
    num_replicas(recipe, world_size, ranks_per_node=ranks_per_node(world_size))
    derived = derive(recipe, world_size)
    deepspeed_config(
        recipe,
        accumulation=derived.accumulation,
        policies=engine_policies(recipe),
        world_size=world_size,
        ranks_per_node=ranks_per_node(world_size),
    )
    registry.resolve(recipe.model.path)
    for doubt in recipe.doubts():
        log.warning(doubt)
    data = load_data(recipe)
    if recipe.is_async:
        check_workers(recipe)
    if recipe.is_rl:
        check_rewards(recipe, list({p.id: p for p in [*data.prompts, *data.shown]}.values()))
    return data


def report(recipe: Recipe, world_size: int, *, overwrite: bool = False) -> str:
    """What `--check` prints when all is well. Raises UserError otherwise."""
    start = find_start(recipe, world_size, overwrite=overwrite)
    data = preflight(recipe, world_size)
    model = load_model(recipe, torch.device("cpu"))
    readable(data.samples, recipe, buckets_of(recipe, model), NUM_DECODED, whole=data.num_samples)
    check_spawned_rewards(recipe)
    counts = (
        f"prompts                    {len(data.prompts)}"
        if recipe.is_rl
        else f"samples                    {len(data.samples)} to train on, {len(data.held_out)} held out"
    )
    lines = [
        f"recipe                     {recipe.algorithm.name}, {'LoRA' if recipe.lora else 'all weights'}",
        f"model                      {model.path}",
        counts,
        f"output                     {beginning(start)}",
        *derive(recipe, world_size).lines(),
        *memory_lines(recipe, model.denoiser, model.default_lora_targets, world_size),
        "all checks passed",
    ]
    return "\n".join(lines)


def beginning(start: Start) -> str:
    if start.finished:
        return f"a run that has finished with step {start.step}: nothing would be done"
    return f"continues after step {start.step} from {start.checkpoint}" if start.checkpoint else "a new run"


def check_spawned_rewards(recipe: Recipe) -> None:
    """Start the service once and stop it: a missing package or model shows here and not an hour later."""
    if recipe.reward is None or not recipe.reward.spawn:
        return
    from wfm_ds.rollout.rewards import RewardService

    with tempfile.TemporaryDirectory(prefix="wfm-check-") as folder, RewardService(recipe.reward, Path(folder)):
        pass
