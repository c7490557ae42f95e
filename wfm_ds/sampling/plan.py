"""Sampling plans: solver coefficients of every step, and the steps that add noise. Computed on the host in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from wfm_ds.errors import RecipeError
from wfm_ds.sampling.denoise import FlowPlan
from wfm_ds.sampling.schedule import solver_steps
from wfm_ds.seeds import derive_seed
from wfm_kernels import sde_coefficients

if TYPE_CHECKING:
    from wfm_ds.recipe.sampling import Window

STD_COLUMN = 2  # column of a coefficient table: standard deviation of the noise of a step


def deterministic_plan(solver: str, sigmas: Tensor) -> FlowPlan:
    """Return a plan with solver `ode` or `dpm2` for noise levels [N+1] float64. Raises as solver_steps does."""
    steps = tuple(solver_steps(solver, sigmas))
    return FlowPlan(steps=steps, table=sde_coefficients("ode", sigmas[:-1], sigmas[1:]))


def stochastic_plan(
    solver: str,
    sigmas: Tensor,
    *,
    noise_level: float,
    noisy_steps: Sequence[int] | None = None,
    stored_steps: Sequence[int] = (),
    keep_means: bool = False,
    gaussian: bool = True,
) -> FlowPlan:
    """Return a plan that uses the solver `flow_sde`, `dance` or `cps` at noisy_steps and Euler steps elsewhere.

    sigmas: noise levels [N+1] float64, N > 1. The first value is replaced by 1 (pure noise), because the coefficients
    at .9997 would be extreme.
    noisy_steps: None for all; `dance` then ends with an Euler step that returns the x0 prediction, as in DanceGRPO.
    stored_steps: steps to store for training. keep_means: store their means too.
    gaussian: False keeps the published log-probability of `cps`, which lacks the variance and the constant.

    Raises RecipeError if a step would flip the sign of the latents (c_x <= 0), and ValueError as solver_steps and
    sde_coefficients do.
    """
    grid = sigmas.clone()
    grid[0] = 1.0
    steps = tuple(solver_steps("ode", grid))
    chosen = list(range(len(steps)))[: -1 if solver == "dance" else None] if noisy_steps is None else list(noisy_steps)
    start, end = grid[:-1], grid[1:]
    table = sde_coefficients("ode", start, end)
    # sigma_max is the second level of the full grid, whichever steps are noisy.
    table[chosen] = sde_coefficients(solver, start[chosen], end[chosen], eta=noise_level, sigma_max=float(grid[1]))
    if gaussian:
        table = use_gaussian_log_prob(table)
    flipped = [k for k in chosen if table[k, 0] <= 0]
    if flipped:
        raise RecipeError(
            f"sampling.noise_level {noise_level} is too large for {solver} at steps {flipped} of {len(steps)}: "
            f"the latents would flip their sign. Lower it or increase sampling.steps"
        )
    stochastic = tuple(k for k in chosen if table[k, STD_COLUMN] > 0)
    return FlowPlan(
        steps=steps, table=table, noisy_steps=stochastic, stored_steps=tuple(stored_steps), keep_means=keep_means
    )


def use_gaussian_log_prob(table: Tensor) -> Tensor:
    """Return a copy of the coefficient table [N,5] with the Gaussian log-density at noisy steps.

    Columns 3 and 4 are its scale and constant: -(mean d^2)/(2 s^2) - ln s - ln(2 pi)/2, where d is the distance from
    the mean of the step and s its std.
    """
    table, noisy = table.clone(), table[:, STD_COLUMN] > 0
    std = table[noisy, STD_COLUMN]
    table[noisy, 3], table[noisy, 4] = 0.5 / std.square(), -std.log() - 0.5 * math.log(2 * math.pi)
    return table


def trainable_steps(window: Window | None, num_steps: int, *, run_seed: int, step: int) -> list[int]:
    """Return the stochastic steps that RL step `step` (from 1) may train on, ascending. Identical on every rank."""
    if window is None:
        return list(range(num_steps - 1))
    if window.kind == "subset":
        keyed = sorted(window.indices, key=lambda k: derive_seed(run_seed, "window", step, k))
        return sorted(keyed[: window.size])
    first, last = window.step_bounds(num_steps)
    positions = last - first - window.size + 1
    if window.kind == "random":
        offset = derive_seed(run_seed, "window", step) % positions
    else:
        offset = window.stride * ((step - 1) // window.iters_per_position) % positions
    return list(range(first + offset, first + offset + window.size))


def all_trainable_steps(window: Window | None, num_steps: int) -> list[int]:
    """Return all steps that `trainable_steps` can return in any RL step, ascending."""
    if window is None:
        return list(range(num_steps - 1))
    if window.kind == "subset":
        return sorted(window.indices)
    return list(range(*window.step_bounds(num_steps)))
