"""Evenly spaced noise levels 1, (N - 1)/N, ..., 1/N for N steps, and a diffusers scheduler with these levels.

diffusers' Euler scheduler starts with the numbers 1 - k * d for steps k = 0, ..., N - 1, evenly spaced from 1 to its
smallest sigma `low`. It applies its timestep shift s to these numbers, and then scales 1 - sigma by a constant c so
that the last sigma is `shift_terminal`. The result is

    1 - sigma = c * k / (A - k)    with    A = s / ((s - 1) * d)    and    d = (1 - low) / (N - 1)

If a timestep shift t is applied to the levels 1 - k / N, the result has the same form with A = t * N / (t - 1). For a
suitable s, both results are equal, so pipelines that only pass the number of steps can use evenly spaced levels.
"""

from __future__ import annotations

import math
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

TOLERANCE = 1e-6  # relative tolerance for comparing a scheduler's shift with the expected shift


def even_levels(num_steps: int) -> list[float]:
    """Return the levels 1, (N - 1)/N, ..., 1/N for N = num_steps, before the timestep shift."""
    return [(num_steps - k) / num_steps for k in range(num_steps)]


def build_even_scheduler(
    shift: float, num_steps: int, num_train_timesteps: int, *, stochastic_sampling: bool = False
) -> Any | None:
    """Return a FlowMatchEulerDiscreteScheduler with evenly spaced noise levels, to which `shift` is applied.

    The pipeline must run exactly `num_steps` steps.
    stochastic_sampling: add noise to the predicted clean latents in each step except the last, instead of taking Euler
    steps. Returns None if there is no scheduler with these levels, as for large shifts and many steps.
    """
    own_shift = _scheduler_shift(shift, num_steps, num_train_timesteps)
    if own_shift is None:
        return None
    last = shift / (num_steps + shift - 1)  # the shifted level 1/N
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=num_train_timesteps,
        shift=own_shift,
        shift_terminal=last if num_steps > 1 else None,
        stochastic_sampling=stochastic_sampling,
    )


def find_even_shift(config: Any, num_steps: int) -> float | None:
    """Return the `shift` argument with which `build_even_scheduler` built the scheduler of this config.

    Returns None for any other scheduler, including one that was built for another number of steps.
    """
    last, own_shift = config["shift_terminal"], config.get("shift")
    if own_shift is None or num_steps == 1:
        return None
    shift = last * (num_steps - 1) / (1 - last)
    expected = _scheduler_shift(shift, num_steps, config["num_train_timesteps"])
    return shift if expected is not None and math.isclose(expected, own_shift, rel_tol=TOLERANCE) else None


def _scheduler_shift(shift: float, num_steps: int, num_train_timesteps: int) -> float | None:
    """Return the s of the module docstring for t = shift and N = num_steps, or None if there is none.

    With m = 1 / num_train_timesteps, the scheduler has low = s * m / (1 + (s - 1) * m). Therefore, s solves
    m * s^2 - b * s + r = 0 with r = (1 - m) * t * N / ((t - 1) * (N - 1)) and b = r - 1 + m.
    """
    if num_steps == 1 or shift == 1:
        return shift
    m = 1 / num_train_timesteps
    r = (1 - m) * shift * num_steps / ((shift - 1) * (num_steps - 1))
    b = r - 1 + m
    discriminant = b * b - 4 * m * r
    return 2 * r / (b + math.copysign(math.sqrt(discriminant), b)) if discriminant >= 0 else None
