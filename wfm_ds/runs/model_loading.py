"""Loads the model of a run and checks that it supports the recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.data.buckets import ImageSize
from wfm_ds.data.datasets import build_buckets
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.adapter_layers import check_lora_layers
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import RecipeError, RewardError, UserError
from wfm_ds.export.target import ExportTarget
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import require_viewpoints
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe.deepspeed import require_idle_expert_support
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.shared_defaults import AttentionName
from wfm_ds.ulysses.install import check_denoiser as check_shareable
from wfm_ds.ulysses.install import check_latent_shape

MAX_RATIO_DIFFERENCE = 1 / 16
"""Maximum relative difference of the aspect ratios of sources and samples. Rounding to a model's size multiple causes
small differences."""


def find_family(recipe: Recipe) -> type[DiffusionModel]:
    """Return the family of the recipe's pipeline. Raises ModelError if the folder or its family is unknown."""
    own = recipe.model.family
    return registry.find_family(registry.locate_pipeline(recipe.model.path, own, recipe.model.revision), own)


def load_model(recipe: Recipe, device: torch.device) -> DiffusionModel:
    """Load the recipe's pipeline and check that it supports the recipe.

    For training from scratch, the denoiser gets random weights. Raises ModelError if the pipeline cannot be loaded,
    RecipeError if the recipe does not fit the model, and UserError if the tokens of a sample cannot be split over the
    ranks.
    """
    settings, size = recipe.model, recipe.sampling
    model = registry.load_model(
        settings.path,
        dtype=DTYPES[settings.dtype],
        device=device,
        vae_dtype=DTYPES[settings.vae_dtype],
        user_family=settings.family,
        revision=settings.revision,
        max_sequence_length=settings.max_sequence_length,
        prompt_template=settings.prompt_template,
        guardrail=settings.guardrail,
        mapped=settings.denoiser_init != "random",
        fps=size.fps,
        inputs=recipe.data.inputs,
        embedded_guidance=settings.embedded_guidance,
        source_size=recipe.data.source_size,
    )
    try:
        shape = model.latent_shape(size.height, size.width, size.num_frames)
    except ValueError as error:
        raise RecipeError(f"sampling: {error}") from error
    rollout_grid, _ = model.rollout_sigmas(size), model.evaluation_sigmas(size)
    if recipe.is_rl:
        build_rl_algorithm(recipe, rollout_grid)  # checks that depend on the model's noise levels
    if (candidates := size.candidate_sampling) is not None:
        model.rollout_sigmas(candidates)
    if recipe.rollout is not None and recipe.rollout.cuda_graph and not model.supports_cuda_graphs:
        raise RecipeError(
            f"rollout.cuda_graph: the network of {model.family} copies numbers from the host in each forward pass, "
            "which a CUDA graph cannot record: set it to false"
        )
    check_conditioning_frames(recipe, model, shape)
    check_data_inputs(recipe, model)
    recipe.algorithm.check_streams(model, size)
    recipe.algorithm.check_model(model, size)
    model.check_sampling(size)
    sizes = build_buckets(recipe, model).sizes  # raises for unsupported sizes
    if recipe.data.image_inputs:
        check_source_ratio(recipe, model, sizes)
    if len(model.sigma_ranges) > 1:
        require_idle_expert_support(recipe)
    elif size.guidance_scale_low is not None:
        raise RecipeError(f"sampling.guidance_scale_low: {model.path} has no second expert: remove the key")
    if recipe.engine.sequence_parallel > 1:
        check_shareable(model.denoiser, recipe.engine.sequence_parallel)
        check_shardable_sizes(recipe, model, [(size.height, size.width), *sizes])
    if recipe.lora is not None:
        check_lora_layers(model.denoiser, recipe.lora, model.default_lora_targets)
    target = ExportTarget.from_model(model, size)
    for component in target.parts:
        target.meta_network(component)  # the export at the end needs the network's class; report a missing class now
    if settings.denoiser_init == "random":
        registry.randomize_denoiser(model, recipe.run.seed)
    return model


def choose_attention(recipe: Recipe, model: DiffusionModel, device: torch.device) -> AttentionName:
    """Return the attention kernel for training. Raises UserError if the recipe's kernel is not available."""
    return attention_kernels.choose_kernel(
        recipe.model.attention, model.unwrapped_denoiser, model.dtype, device, trains=True
    )


def check_shardable_sizes(recipe: Recipe, model: DiffusionModel, sizes: Sequence[ImageSize]) -> None:
    """Raise RecipeError if samples of one of these sizes have too few tokens to split over a replica's ranks."""
    for height, width in dict.fromkeys(sizes):
        shape = model.latent_shape(height, width, recipe.sampling.num_frames)
        try:
            check_latent_shape(model.denoiser, recipe.engine.sequence_parallel, shape)
        except UserError as error:
            is_main_size = (height, width) == (recipe.sampling.height, recipe.sampling.width)
            section = "sampling" if is_main_size else "data.buckets"
            raise RecipeError(f"{section}: size [{height}, {width}] cannot be split over ranks: {error}") from error


def check_data_inputs(recipe: Recipe, model: DiffusionModel) -> None:
    """Raise RecipeError if data.inputs has an input that the model does not support, or lacks a required input."""
    supported = ", ".join(sorted(model.input_specs)) or "only text and frames"
    if unknown := [name for name in recipe.data.inputs if name not in model.input_specs]:
        raise RecipeError(
            f"data.inputs {', '.join(unknown)}: {model.family} supports {supported}: remove it, or use another model"
        )
    for name in recipe.data.inputs:
        partner = model.input_specs[name].requires_input
        if partner is not None and partner not in recipe.data.inputs:
            raise RecipeError(f"data.inputs {name}: {model.family} needs {partner} too: add it, or remove {name}")
    views = [recipe.data.viewpoint, *(part.viewpoint for part, _ in recipe.data.set_recipes().values())]
    if any(views):
        require_viewpoints(model, recipe.sampling, "data.viewpoint")
    required = [name for name, spec in model.input_specs.items() if spec.required]
    if missing := [name for name in required if name not in recipe.data.inputs]:
        raise RecipeError(f"{model.family} needs {', '.join(missing)}: add it to data.inputs")
    if recipe.data.image_inputs:
        check_sources(recipe, model)


def check_sources(recipe: Recipe, model: DiffusionModel) -> None:
    """Raise RecipeError for settings of source images that the model does not support."""
    size = model.source_image_size(recipe.sampling.height, recipe.sampling.width)
    try:
        model.latent_shape(*size)
    except ValueError as error:
        raise RecipeError(f"data.source_size: {size[0]} x {size[1]}: {error}") from error
    check_source_ratio(recipe, model, [(recipe.sampling.height, recipe.sampling.width)])
    if model.text_inputs & model.input_names and recipe.data.crop == "random":
        raise RecipeError(f"data.crop: random: the text encoder of {model.family} would encode every crop: set centre")


def has_image_rewards(recipe: Recipe) -> bool:
    """Return whether a reward of the run is known to look at source images. False for classes of other services."""
    from wfm_reward import registry as rewards

    reward = recipe.all_reward_settings
    if reward is None:
        return False
    for function in reward.functions:
        with contextlib.suppress(RewardError):  # rollout workers may lack a user class
            known = rewards.find_reward_class(function.name, is_local=reward.spawn)
            if known is not None and known.sees_images:
                return True
    return False


def check_source_ratio(recipe: Recipe, model: DiffusionModel, sizes: Sequence[ImageSize]) -> None:
    """Raise RecipeError if rewards see sources of another aspect ratio than one of these sample sizes.

    Such rewards compare samples with their sources, resized to the size of the sample.
    """
    if isinstance(model.source_size, str) or not has_image_rewards(recipe):
        return
    source_height, source_width = model.source_size
    for height, width in sizes:
        if abs(source_width * height / (source_height * width) - 1) > MAX_RATIO_DIFFERENCE:
            raise RecipeError(
                f"data.source_size [{source_height}, {source_width}] has another aspect ratio than samples of size "
                f"[{height}, {width}], with which rewards compare sources: change the size, or set it to target"
            )


def check_conditioning_frames(recipe: Recipe, model: DiffusionModel, shape: Sequence[int]) -> None:
    """Raise RecipeError if a number of conditioning frames is not supported or leaves no frame to predict."""
    low, high = recipe.algorithm.conditioning_frame_range
    unknown = sorted(set(range(low, high + 1)) - set(model.conditioning_frame_counts))
    if unknown:
        supported = " or ".join(map(str, model.conditioning_frame_counts))
        raise RecipeError(
            f"algorithm.max_num_conditional_frames {high}: {model.family} supports {supported} conditioning latent "
            f"frames: change the range {low} to {high}"
        )
    num_frames = model.num_latent_frames(shape)
    if high >= num_frames:
        raise RecipeError(
            f"algorithm.max_num_conditional_frames {high} leaves none of {num_frames} latent frames to predict: lower "
            "it or raise sampling.num_frames"
        )
