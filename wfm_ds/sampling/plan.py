"""Plans of rollouts: the solver's coefficients at every step, and where noise enters. Host side, float64."""

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

STD = 2  # the column of a coefficient table that holds the standard deviation of a step's noise


def deterministic_plan(solver: str, sigmas: Tensor) -> FlowPlan:
    """`ode` or `dpm2` on the grid [N+1] float64; ValueError for another solver or grid (schedule.solver_steps)."""
    steps = tuple(solver_steps(solver, sigmas))
    return FlowPlan(steps=steps, table=sde_coefficients("ode", sigmas[:-1], sigmas[1:]))


def stochastic_plan(
    solver: str,
    sigmas: Tensor,
    *,
    noise_level: float,
    noisy: Sequence[int] | None = None,
    stored: Sequence[int] = (),
    keep_means: bool = False,
    gaussian: bool = True,
) -> FlowPlan:
    """`flow_sde`, `dance` or `cps` at the steps `noisy` of the grid [N+1] float64, N > 1, and Euler at the others.

    noisy None: all steps; a last step of dance is Euler then, whose result is x0_hat, as DanceGRPO decodes it. The grid
    begins at 1 exactly: latents there are pure noise, and the coefficients of .9997 are absurd. `gaussian: False` keeps
    the published log-probability of cps, which has neither variance nor constant. Raises RecipeError where a step would
    turn the latents' sign (c_x <= 0), ValueError for what solver_steps and sde_coefficients refuse.
    """
    grid = sigmas.clone()
    grid[0] = 1.0
    steps = tuple(solver_steps("ode", grid))
    chosen = list(range(len(steps)))[: -1 if solver == "dance" else None] if noisy is None else list(noisy)
    here, after = grid[:-1], grid[1:]
    table = sde_coefficients("ode", here, after)
    # sigma_max is the second level of the whole grid, wherever noise enters.
    table[chosen] = sde_coefficients(solver, here[chosen], after[chosen], eta=noise_level, sigma_max=float(grid[1]))
    if gaussian:
        table = with_gaussian_log_prob(table)
    turned = [k for k in chosen if table[k, 0] <= 0]
    if turned:
        raise RecipeError(
            f"sampling.noise_level {noise_level} of {solver} is too large for steps {turned} of {len(steps)}: they "
            f"would turn the sign of the latents; lower it, or use more sampling.steps"
        )
    drawn = tuple(k for k in chosen if table[k, STD] > 0)
    return FlowPlan(steps=steps, table=table, noisy=drawn, stored=tuple(stored), keep_means=keep_means)


def with_gaussian_log_prob(table: Tensor) -> Tensor:
    """The coefficient table [N,5] with w and c0 of the Gaussian log-density, -(mean d^2)/(2 s^2) - ln s - ln(2 pi)/2,
    at its noisy rows."""
    table, noisy = table.clone(), table[:, STD] > 0
    std = table[noisy, STD]
    table[noisy, 3], table[noisy, 4] = 0.5 / std.square(), -std.log() - 0.5 * math.log(2 * math.pi)
    return table


def noisy_steps(window: Window | None, num_steps: int, *, run_seed: int, step: int) -> list[int]:
    """The denoise steps of RL step `step` (from 1) that are Gaussian draws and may be trained on, ascending.

    Without a window all but the last, otherwise as the window says: the same for every rank and sample.
    """
    if window is None:
        return list(range(num_steps - 1))
    if window.kind == "subset":
        keyed = sorted(window.indices, key=lambda k: derive_seed(run_seed, "window", step, k))
        return sorted(keyed[: window.size])
    first, last = window.bounds(num_steps)
    positions = last - first - window.size + 1
    if window.kind == "random":
        offset = derive_seed(run_seed, "window", step) % positions
    else:
        offset = window.stride * ((step - 1) // window.iters_per_position) % positions
    return list(range(first + offset, first + offset + window.size))


def possible_steps(window: Window | None, num_steps: int) -> list[int]:
    """All steps that `noisy_steps` may ever return, ascending."""
    if window is None:
        return list(range(num_steps - 1))
    if window.kind == "subset":
        return sorted(window.indices)
    return list(range(*window.bounds(num_steps)))
