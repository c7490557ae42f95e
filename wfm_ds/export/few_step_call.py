"""Builds the diffusers pipeline call that generates the same samples as validation with `sampling.eval_grid: even`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from wfm_ds.errors import ModelError
from wfm_ds.models.even_scheduler import build_even_scheduler, even_levels
from wfm_ds.models.noise_schedule import SIGMA_ERROR, read_sigmas

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.recipe.sampling import SamplingRecipe


Config: TypeAlias = Mapping[str, Any]


def build_few_step_call(model: DiffusionModel, sampling: SamplingRecipe) -> tuple[Config, Config | None, Config | None]:
    """Return the pipeline call for evenly spaced noise levels: (arguments, scheduler config, guider config).

    arguments: all except prompts and inputs. scheduler config: content of scheduler_config.json, or None if the
    pipeline keeps its scheduler. guider config: content of guider_config.json, or None if it has no guider.

    The call contains `sigmas` if the pipeline passes them to an Euler scheduler. Otherwise, a scheduler
    with these levels replaces the pipeline's scheduler. For `eval_solver: cps`, the scheduler adds noise. If the
    pipeline has a guider, one with the recipe's guidance scale replaces it.
    Raises ModelError if plain diffusers cannot use the levels or the guidance.
    """
    pipeline, num_steps = model.pipeline, sampling.eval_steps
    shape = model.latent_shape(sampling.height, sampling.width, sampling.num_frames)
    sigmas = model.evaluation_sigmas(sampling)
    config, parameters = pipeline.scheduler.config, inspect.signature(type(pipeline).__call__).parameters
    adds_noise = sampling.eval_solver == "cps"
    arguments: dict[str, Any] = {"num_inference_steps": num_steps}
    scheduler: Any = None
    if "sigmas" in parameters and isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
        arguments["sigmas"] = even_levels(num_steps)
        changes: dict[str, Any] = {}
        if bool(config.get("stochastic_sampling")) != adds_noise:
            changes["stochastic_sampling"] = adds_noise
        if config.get("shift_terminal"):  # would scale all levels so that the last level is shift_terminal
            changes["shift_terminal"] = None
        if sampling.grid_shift is not None:
            changes |= {"shift": sampling.grid_shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(config, **changes) if changes else None
    else:
        shift = sampling.grid_shift or model.flow_shift(sampling)
        scheduler = build_even_scheduler(shift, num_steps, config.num_train_timesteps, stochastic_sampling=adds_noise)
    levels = {"sigmas": arguments["sigmas"]} if "sigmas" in arguments else {}
    schedule = {**model.schedule_arguments(shape, num_steps), **levels}
    drawn = read_sigmas(scheduler or pipeline.scheduler, num_steps, schedule)
    if not torch.allclose(drawn, sigmas, rtol=0, atol=SIGMA_ERROR):
        raise ModelError(
            f"{model.path}: {type(pipeline).__name__} of diffusers cannot use the even noise levels of {num_steps} "
            "steps: set sampling.eval_grid: stock"
        )
    try:
        size = sampling.height, sampling.width, sampling.num_frames
        arguments |= model.pipeline_call_kwargs(sampling.guidance_scale, *size)
    except ValueError as error:
        raise ModelError(f"{model.path}: {error}: change sampling.guidance_scale") from error
    if sampling.guidance_scale_low is not None:
        arguments[model.guidance_arguments[1]] = sampling.guidance_scale_low
    if sampling.negative_prompt is not None and sampling.uses_guidance() and "negative_prompt" in parameters:
        arguments["negative_prompt"] = sampling.negative_prompt
    stored_scheduler = None if scheduler is None else json.loads(scheduler.to_json_string())
    return arguments, stored_scheduler, model.guider_config(sampling.guidance_scale)
