"""The noise levels (sigmas) of a model, computed by its pipeline's scheduler."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.even_scheduler import even_levels, find_even_shift
from wfm_ds.models.vae import PixelCodec
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.plan import apply_shift

SIGMA_ERROR = 1e-6  # maximum rounding error of sigmas, which diffusers computes in float32


class NoiseSchedule(PixelCodec):
    """Computes the sigmas and the timestep shift of a model. Some schedulers use the size of the latents."""

    def sigmas(self, num_steps: int, shape: Sequence[int]) -> Tensor:
        """Return the scheduler's sigmas for latents of this shape.

        The result is float64 [num_steps + 1] on the CPU and decreases from at most 1 to 0. Raises ModelError if the
        scheduler's sigmas do not decrease like this.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        scheduler = self.pipeline.scheduler
        grid = read_sigmas(scheduler, num_steps, self.schedule_arguments(shape, num_steps))
        falls = bool((grid[1:] < grid[:-1]).all())
        if len(grid) != num_steps + 1 or not falls or grid[0] > 1 or grid[-1] != 0:
            raise ModelError(
                f"{self.path}: the sigmas of {num_steps} steps of {type(scheduler).__name__} do not decrease from at "
                f"most 1 to 0 ({grid.tolist()}); use a flow-matching scheduler or fewer steps"
            )
        return grid

    def rollout_sigmas(self, sampling: SamplingRecipe) -> Tensor:
        """Return the sigmas that sampling.grid specifies for rollouts, float64 [sampling.steps + 1] on the CPU.

        Raises ModelError if sampling.grid needs a timestep shift that neither the recipe nor the scheduler has.
        """
        return self._recipe_sigmas(sampling, "grid", sampling.steps)

    def evaluation_sigmas(self, sampling: SamplingRecipe) -> Tensor:
        """Return the sigmas of validation and `wfm generate`, float64 [sampling.eval_steps + 1] on the CPU.

        Raises ModelError if sampling.eval_grid needs a timestep shift that neither the recipe nor the scheduler has.
        """
        return self._recipe_sigmas(sampling, "eval_grid", sampling.eval_steps)

    def _recipe_sigmas(self, sampling: SamplingRecipe, key: Literal["grid", "eval_grid"], num_steps: int) -> Tensor:
        shape = self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        if getattr(sampling, key) == "stock":
            return self.sigmas(num_steps, shape)
        shift = sampling.grid_shift or self._scheduler_shift(num_steps, shape)
        if shift is None:
            raise ModelError(
                f"{self.path}: the scheduler has no fixed shift: set sampling.grid_shift, or sampling.{key}: stock"
            )
        return apply_shift(torch.tensor([*even_levels(num_steps), 0.0], dtype=torch.float64), shift)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        """Return additional arguments for scheduler.set_timesteps, as the diffusers pipeline passes them.

        If they contain `sigmas`, num_inference_steps is not passed, and the scheduler applies its timestep shift to
        `sigmas`.
        """
        return {}

    def shift_parameter(self, num_tokens: int, **defaults: float) -> float:
        """Return the scheduler's argument mu, linear in the number of tokens, as diffusers' calculate_shift.

        defaults: limits of the pipeline, for schedulers without them in their configs.
        """
        config = {**defaults, **self.pipeline.scheduler.config}
        slope = (config["max_shift"] - config["base_shift"]) / (
            config["max_image_seq_len"] - config["base_image_seq_len"]
        )
        return float(num_tokens * slope + (config["base_shift"] - slope * config["base_image_seq_len"]))

    @property
    def default_solver(self) -> str:
        return "dpm2" if self.pipeline.scheduler.config.get("solver_order", 1) > 1 else "ode"

    def flow_shift(self, sampling: SamplingRecipe) -> float:
        """Return the scheduler's timestep shift s, which maps q in [0, 1] to sigma = s * q / (1 + (s - 1) * q).

        If s depends on size or number of steps, it is computed for the recipe's size and eval_steps. Raises ModelError
        if the scheduler has no such shift.
        """
        shape = self.latent_shape(sampling.height, sampling.width, sampling.num_frames)
        shift = self._scheduler_shift(sampling.eval_steps, shape)
        if shift is None:
            raise ModelError(f"{self.path}: the scheduler has no fixed shift; set algorithm.flow_shift")
        return shift

    def _scheduler_shift(self, num_steps: int, shape: Sequence[int]) -> float | None:
        config = self.pipeline.scheduler.config
        if config.get("use_karras_sigmas"):
            return None
        if config.get("use_dynamic_shifting"):
            mu = self.schedule_arguments(shape, num_steps).get("mu")
            # diffusers computes sigma = mu / (mu + 1 / q - 1), or the same with e^mu in place of mu. This equals the
            # formula in flow_shift with s = mu or s = e^mu.
            return None if mu is None else math.exp(mu) if config.time_shift_type == "exponential" else float(mu)
        shift = config.get("shift", config.get("flow_shift"))
        if shift is not None and config.get("shift_terminal"):
            return find_even_shift(config, num_steps)
        return None if shift is None else float(shift)


def read_sigmas(scheduler: Any, num_steps: int, arguments: Mapping[str, Any]) -> Tensor:
    """Return the sigmas of a diffusers scheduler, including the final 0, as float64 [num_steps + 1] on the CPU.

    arguments: see NoiseSchedule.schedule_arguments.
    """
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(**({} if "sigmas" in arguments else {"num_inference_steps": num_steps}), **arguments)
    grid: Tensor = scheduler.sigmas.to("cpu", torch.float64)
    rounded = (grid > 1) & (grid < 1 + SIGMA_ERROR)
    return torch.where(rounded, 1.0, grid)
