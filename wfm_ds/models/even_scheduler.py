"""Even noise levels q = 1, (N - 1)/N, .. 1/N for N steps, and a diffusers scheduler with these levels.

diffusers' Euler scheduler places N numbers x evenly from 1 to its smallest sigma, applies its own shift s to them, and
then scales 1 - sigma so that the last sigma is `shift_terminal`. With x = 1 - k d for step k, the result is

    1 - sigma = c k / (A - k),    A = s / ((s - 1) d),    d = (1 - smallest sigma) / (N - 1)

The even levels with shift t have the same form with A = t N / (t - 1). So a scheduler with a suitable s has exactly
these levels, although its pipeline passes only the number of steps.
"""

from __future__ import annotations

import math
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

TOLERANCE = 1e-6  # relative tolerance for comparing a scheduler's shift with the expected shift


def even_levels(num_steps: int) -> list[float]:
    """Return the N levels 1, (N - 1)/N, .. 1/N, before the timestep shift and without the final 0."""
    return [(num_steps - k) / num_steps for k in range(num_steps)]


def build_even_scheduler(
    shift: float, num_steps: int, num_train_timesteps: int, *, stochastic_sampling: bool = False
) -> Any | None:
    """Return a FlowMatchEulerDiscreteScheduler with evenly spaced noise levels, to which this shift is applied.

    Its timesteps are not rounded. It takes Euler steps; with stochastic_sampling, each step except the last adds noise
    to the predicted clean latents. The levels are evenly spaced only if the pipeline runs `num_steps` steps. Returns
    None if no such scheduler exists, which is possible only for large shifts and many steps.
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
    """Return the shift for which `build_even_scheduler` built a scheduler with this config and `num_steps` steps.

    Returns None for any other scheduler with a `shift_terminal`.
    """
    last, own_shift = config["shift_terminal"], config.get("shift")
    if own_shift is None or num_steps == 1:
        return None
    shift = last * (num_steps - 1) / (1 - last)
    expected = _scheduler_shift(shift, num_steps, config["num_train_timesteps"])
    return shift if expected is not None and math.isclose(expected, own_shift, rel_tol=TOLERANCE) else None


def _scheduler_shift(shift: float, num_steps: int, num_train_timesteps: int) -> float | None:
    """Return the scheduler's own shift s for even levels with shift t, or None if there is none.

    The smallest sigma is the shifted m = 1 / num_train_timesteps. So s solves m s^2 - b s + r = 0 with
    r = (1 - m) t N / ((t - 1) (N - 1)) and b = r - 1 + m.
    """
    if num_steps == 1 or shift == 1:
        return shift
    m = 1 / num_train_timesteps
    r = (1 - m) * shift * num_steps / ((shift - 1) * (num_steps - 1))
    b = r - 1 + m
    discriminant = b * b - 4 * m * r
    return 2 * r / (b + math.copysign(math.sqrt(discriminant), b)) if discriminant >= 0 else None
