"""Timestep shift and solver coefficients, in float64 on the host. The model's scheduler defines the noise levels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

FLOW_SOLVERS = ("ode", "dpm2")
# The second-order term extrapolates the last two predictions linearly in log-SNR. For steps much longer than the
# previous one this is worse than Euler, for example at the end of the default SD3 grid, which ends close to 0. Grids of
# multistep schedulers have no step more than twice as long as the previous one.
MAX_STEP_GROWTH = 2.0


def apply_shift(q: Tensor, shift: float) -> Tensor:
    """Return sigma = shift*q / (1 + (shift-1)*q), i.e. logit(sigma) = logit(q) + ln(shift), for q in [0, 1]."""
    return shift * q / (1 + (shift - 1) * q)


def invert_shift(sigma: Tensor, shift: float) -> Tensor:
    """Return the q with apply_shift(q, shift) == sigma, for sigma in [0, 1]."""
    return sigma / (shift - (shift - 1) * sigma)


@dataclass(frozen=True, slots=True)
class SolverStep:
    """One denoising step from s = sigma to s' = sigma_next, with the velocity v and x0_hat = x - s*v at s:

        x' = x + (s'-s)*v + correction*(x0_hat - previous x0_hat)

    Euler steps have correction = 0. The formula equals the DPM-Solver++ form

        x' = (s'/s)*x + (1-s'/s)*x0_hat + correction*(x0_hat - previous x0_hat)

    but is accurate in float32 when s' is close to s.
    """

    sigma: float
    sigma_next: float
    correction: float = 0.0


def solver_steps(solver: str, sigmas: Tensor) -> list[SolverStep]:
    """Return the N steps of `solver` on the noise levels `sigmas`.

    sigmas: [N+1] float64 on the CPU, descending from at most 1 to 0. `ode` is Euler. `dpm2` is DPM-Solver++ 2M (arXiv
    2211.01095, midpoint form) for flow matching, with Euler steps at step 0, at the last step, at step 1 if the first
    noise level is 1, and at steps more than MAX_STEP_GROWTH times as long as the previous one. Raises ValueError for an
    unknown solver and for other noise levels.
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
