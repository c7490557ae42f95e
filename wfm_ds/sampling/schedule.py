"""Noise levels and solver coefficients, in float64 on the host. The grid itself comes from the family's scheduler."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

SOLVERS = ("ode", "dpm2")
# The line through the last two predictions says nothing many times their distance away, in log-SNR: a grid that ends
# close to 0, as the stock one of SD3 does, is worse off by it than with Euler. In the grids of multistep schedulers no
# step is twice as long as the one before.
MAX_GROWTH = 2.0


def shifted(q: Tensor, shift: float) -> Tensor:
    """sigma = shift*q / (1 + (shift-1)*q), that is logit(sigma) = logit(q) + ln(shift), for q in [0, 1]."""
    return shift * q / (1 + (shift - 1) * q)


def unshifted(sigma: Tensor, shift: float) -> Tensor:
    """The q of `shifted`, from sigma in [0, 1]."""
    return sigma / (shift - (shift - 1) * sigma)


@dataclass(frozen=True, slots=True)
class SolverStep:
    """One denoise step from s = sigma to s' = sigma_next, with the velocity v and x0_hat = x - s*v at s:

        x' = x + (s'-s)*v + correction*(x0_hat - x0_hat of the step before)

    Euler is correction = 0. Equal to x' = (s'/s)*x + (1-s'/s)*x0_hat + correction*(...), the form of DPM-Solver++, but
    exact in float32 where s' is close to s.
    """

    sigma: float
    sigma_next: float
    correction: float = 0.0


def solver_steps(solver: str, sigmas: Tensor) -> list[SolverStep]:
    """The N steps of `solver` on the grid `sigmas`: [N+1] float64 on the CPU, descending from at most 1 to 0.

    `ode` is Euler. `dpm2` is DPM-Solver++ 2M (arXiv 2211.01095, midpoint form) on the flow: second order, except for
    step 0, the last step, step 1 when the grid starts at 1, and steps that are more than MAX_GROWTH times as long as
    the one before, which are Euler's.
    Raises ValueError for any other grid or solver.
    """
    grid = _checked_grid(sigmas)
    corrections = [0.0] * (len(grid) - 1)
    if solver == "dpm2":
        corrections[1:-1] = [_second_order(*grid[i - 1 : i + 2]) for i in range(1, len(grid) - 2)]
    elif solver != "ode":
        raise ValueError(f"{solver!r} is no solver; the solvers are {', '.join(SOLVERS)}")
    return [SolverStep(*pair, c) for pair, c in zip(itertools.pairwise(grid), corrections, strict=True)]


def _checked_grid(sigmas: Tensor) -> list[float]:
    # On the CPU: reading values of a device tensor would wait for the device.
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas.dtype != torch.float64 or sigmas.device.type != "cpu":
        raise ValueError(
            f"sigmas must be [N+1] float64 on the CPU with N >= 1, got {list(sigmas.shape)} {sigmas.dtype} on "
            f"{sigmas.device}"
        )
    grid: list[float] = sigmas.tolist()
    falls = all(now > after for now, after in itertools.pairwise(grid))  # False with a NaN
    if not falls or grid[0] > 1 or grid[-1] != 0:
        raise ValueError(f"sigmas must fall strictly from at most 1 to 0, got {grid}")
    return grid


def _second_order(before: float, now: float, after: float) -> float:
    """Weight of x0_hat(now) - x0_hat(before) in the step from now to after."""
    h = _half_log_snr(after) - _half_log_snr(now)
    h_before = _half_log_snr(now) - _half_log_snr(before)  # inf when before = 1, where the weight is 0
    return 0.0 if h > MAX_GROWTH * h_before else (1 - after / now) * h / (2 * h_before)


def _half_log_snr(sigma: float) -> float:
    return -math.inf if sigma == 1 else math.log((1 - sigma) / sigma)
