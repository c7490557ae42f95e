"""Sampling plans of an RL step's rollouts, from the recipe's sampling section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from wfm_ds.recipe.sampling import DEFAULT_NOISE_LEVELS
from wfm_ds.sampling.plan import deterministic_plan, stochastic_plan, trainable_steps

if TYPE_CHECKING:
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.sampling.denoise import FlowPlan


def noise_level(sampling: SamplingRecipe) -> float:
    """Return the noise scale of the stochastic solver: sampling.noise_level, or the solver's published default."""
    return DEFAULT_NOISE_LEVELS[sampling.solver] if sampling.noise_level is None else sampling.noise_level


def rollout_plan(
    sampling: SamplingRecipe,
    sigmas: Tensor,
    *,
    run_seed: int,
    step: int,
    store_steps: bool = False,
    keep_means: bool = False,
    gaussian: bool = True,
) -> FlowPlan:
    """Return the sampling plan of RL step `step` for the noise levels `sigmas` [N+1].

    store_steps: store the trainable steps. keep_means: also store the means of their Gaussians. gaussian: see
    stochastic_plan. Raises RecipeError as stochastic_plan does.
    """
    if not sampling.is_stochastic:
        return deterministic_plan(sampling.solver, sigmas)
    trainable = trainable_steps(sampling.window, sampling.steps, run_seed=run_seed, step=step)
    return stochastic_plan(
        sampling.solver,
        sigmas,
        noise_level=noise_level(sampling),
        noisy_steps=None if sampling.window is None else trainable,
        stored_steps=trainable if store_steps else (),
        keep_means=keep_means,
        gaussian=gaussian,
    )


def exploration_plan(sampling: SamplingRecipe, sigmas: Tensor) -> FlowPlan:
    """Return the plan for the candidates of sampling.explore: the rollout's solver, or `ode` if it is stochastic."""
    return deterministic_plan("ode" if sampling.is_stochastic else sampling.solver, sigmas)
