"""Sampling plans: timestep shift, solver coefficients of every step, and the choice of the steps that add noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sampling import DEFAULT_NOISE_LEVELS, SamplingRecipe, Window
from wfm_ds.sampling.denoise import FlowPlan, SolverStep
from wfm_ds.seeds import derive_seed
from wfm_kernels import sde_coefficients

FLOW_SOLVERS = ("ode", "dpm2")
# The second-order term extrapolates the last two predictions linearly in log-SNR. After a much shorter step, this is
# less accurate than an Euler step. An example is the end of SD3's default grid, where sigma is close to 0. In the grids
# of multistep schedulers, no step is more than twice as long as the previous step.
MAX_STEP_GROWTH = 2.0
STD_COLUMN = 2  # column of a coefficient table: standard deviation of the noise of a step


def apply_shift(q: Tensor, shift: float) -> Tensor:
    """Return sigma = shift*q / (1 + (shift-1)*q), i.e. logit(sigma) = logit(q) + ln(shift), for q in [0, 1]."""
    return shift * q / (1 + (shift - 1) * q)


def invert_shift(sigma: Tensor, shift: float) -> Tensor:
    """Return the q with apply_shift(q, shift) == sigma, for sigma in [0, 1]."""
    return sigma / (shift - (shift - 1) * sigma)


def solver_steps(solver: str, sigmas: Tensor) -> list[SolverStep]:
    """Return the N steps of `solver` between the N+1 noise levels `sigmas`.

    sigmas: [N+1] float64 on the CPU, strictly decreasing from at most 1 to 0.
    `ode` uses only Euler steps. `dpm2` uses second-order steps of DPM-Solver++ 2M (arXiv 2211.01095, midpoint form) for
    flow matching. However, `dpm2` uses an Euler step for the first step, the last step, the second step if sigmas[0] is
    1, and each step that is more than MAX_STEP_GROWTH times as long (in log-SNR) as the previous step.
    Raises ValueError if `solver` is unknown or `sigmas` is invalid.
    """
    grid = _validate_grid(sigmas)
    corrections = [0.0] * (len(grid) - 1)
    if solver == "dpm2":
        corrections[1:-1] = [_second_order_weight(*grid[i - 1 : i + 2]) for i in range(1, len(grid) - 2)]
    elif solver != "ode":
        raise ValueError(f"unknown solver {solver!r}: use {' or '.join(FLOW_SOLVERS)}")
    return [SolverStep(*pair, c) for pair, c in zip(itertools.pairwise(grid), corrections, strict=True)]


def _validate_grid(sigmas: Tensor) -> list[float]:
    # On the CPU: reading values of a device tensor would synchronize with the device.
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas.dtype != torch.float64 or sigmas.device.type != "cpu":
        raise ValueError(
            f"sigmas must be [N+1] float64 on the CPU with N >= 1, got {list(sigmas.shape)} {sigmas.dtype} on "
            f"{sigmas.device}"
        )
    grid: list[float] = sigmas.tolist()
    decreases = all(start > end for start, end in itertools.pairwise(grid))  # False with a NaN
    if not decreases or grid[0] > 1 or grid[-1] != 0:
        raise ValueError(f"sigmas must decrease strictly from at most 1 to 0, got {grid}")
    return grid


def _second_order_weight(before: float, now: float, after: float) -> float:
    """Return the weight of x0_hat(now) - x0_hat(before) in the step from noise level `now` to `after`."""
    h = _half_log_snr(after) - _half_log_snr(now)
    h_before = _half_log_snr(now) - _half_log_snr(before)  # inf if before = 1: the weight is then 0
    return 0.0 if h > MAX_STEP_GROWTH * h_before else (1 - after / now) * h / (2 * h_before)


def _half_log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)


def deterministic_plan(solver: str, sigmas: Tensor) -> FlowPlan:
    """Return a plan with solver `ode` or `dpm2` for noise levels [N+1] float64.

    Raises ValueError in the same cases as solver_steps.
    """
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

    sigmas: noise levels [N+1] float64, N > 1. The first value is replaced by 1 (pure noise).
    noisy_steps: indices of the steps that add noise. None: all steps; with `dance`, the last step is then an Euler
    step, as in DanceGRPO.
    stored_steps: steps to store for training. keep_means: see SamplingPlan.keep_means.
    gaussian: whether `cps` uses the full Gaussian log-probability. If False, `cps` uses the published form without the
    variance and the constant.
    Raises RecipeError if a step would flip the sign of the latents (c_x <= 0), and ValueError in the same cases as
    solver_steps and sde_coefficients.
    """
    grid = sigmas.clone()
    grid[0] = 1.0
    steps = tuple(solver_steps("ode", grid))
    chosen = list(range(len(steps)))[: -1 if solver == "dance" else None] if noisy_steps is None else list(noisy_steps)
    start, end = grid[:-1], grid[1:]
    table = sde_coefficients("ode", start, end)
    # sigma_max is the second level of the full grid. It does not depend on which steps are noisy.
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
    """Return a copy of the coefficient table [N,5] in which noisy steps have the Gaussian log-density.

    Columns 3 and 4 of the table are the scale and the constant of -mean(d^2)/(2 s^2) - ln(s) - ln(2 pi)/2, with d =
    next latents - mean of the step and s = std of the step.
    """
    table, noisy = table.clone(), table[:, STD_COLUMN] > 0
    std = table[noisy, STD_COLUMN]
    table[noisy, 3], table[noisy, 4] = 0.5 / std.square(), -std.log() - 0.5 * math.log(2 * math.pi)
    return table


def trainable_steps(window: Window | None, num_steps: int, *, run_seed: int, step: int) -> list[int]:
    """Return the stochastic steps that RL step `step` (from 1) may train on, ascending. All ranks get the same steps.

    window: recipe section sampling.window. None: all steps except the last.
    """
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


def noise_level(sampling: SamplingRecipe) -> float:
    """Return the noise scale of the stochastic solver: sampling.noise_level, or the solver's published default."""
    return DEFAULT_NOISE_LEVELS[sampling.solver] if sampling.noise_level is None else sampling.noise_level


def rollout_plan(
    sampling: SamplingRecipe,
    sigmas: Tensor,
    *,
    run_seed: int = 0,
    step: int = 0,
    store_steps: bool = False,
    keep_means: bool = False,
    gaussian: bool = True,
) -> FlowPlan:
    """Return the sampling plan of RL step `step` for the noise levels `sigmas` [N+1].

    run_seed, step: ignored for deterministic solvers. store_steps: whether to store the trainable steps. keep_means,
    gaussian: see stochastic_plan. Raises RecipeError in the same cases as stochastic_plan.
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


def plan_without_window(sampling: SamplingRecipe, sigmas: Tensor, *, gaussian: bool = True) -> FlowPlan:
    """Return the sampling plan of a recipe without sampling.window. sigmas, gaussian: see rollout_plan."""
    return rollout_plan(sampling.model_copy(update={"window": None}), sigmas, gaussian=gaussian)


def exploration_plan(sampling: SamplingRecipe, sigmas: Tensor) -> FlowPlan:
    """Return the sampling plan for the candidate samples of the recipe section sampling.explore.

    The solver is `ode` if the rollout's solver is stochastic, otherwise the rollout's solver.
    """
    return deterministic_plan("ode" if sampling.is_stochastic else sampling.solver, sigmas)
