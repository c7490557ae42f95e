"""Rollout solvers in float64, following the papers."""

import itertools
import math
from dataclasses import dataclass


def sample_ode(predict, latents, grid):
    """Denoise with Euler steps."""
    for sigma, after in itertools.pairwise(grid):
        latents = latents + (after - sigma) * predict(latents, sigma)
    return latents


def flow_sde(latents, velocity, grid, k, noise_level):
    """Return mean and std of a step of Flow-GRPO (arXiv 2505.05470, eq. 9), for noise levels with grid[0] = 1."""
    sigma, dt = grid[k], grid[k] - grid[k + 1]
    diffusion = noise_level * math.sqrt(sigma / (1 - (grid[1] if sigma == 1 else sigma)))
    score_part = diffusion**2 / (2 * sigma) * (latents + (1 - sigma) * velocity)
    return latents - dt * (velocity + score_part), diffusion * math.sqrt(dt)


@dataclass
class EdmStep:
    """A step from noise level `level`. `now` and `before`: weights of the last two predictions. `std`: its noise."""

    level: float
    keep: float
    now: float
    before: float
    std: float

    @property
    def sigma(self):
        return self.level / (1 + self.level)


def karras_levels(num_steps):
    """Return the noise levels of EDM from 200 to 0.01 (arXiv 2206.00364, eq. 5)."""
    ends = 200 ** (1 / 7), 0.01 ** (1 / 7)
    return [(ends[0] + i / num_steps * (ends[1] - ends[0])) ** 7 for i in range(num_steps + 1)]


def churn(levels, s_churn):
    """Return the factor by which churn raises a level, and a function from a level to the std of the added noise."""
    factor = 1 + min(s_churn / len(levels), math.sqrt(1.2) - 1)
    return factor, lambda level: level * math.sqrt(factor**2 - 1)


def edm_steps(levels, s_churn):
    """Return the steps of the two-step Adams-Bashforth solver in ln(level), with churn before each step."""
    factor, std = churn(levels, s_churn)
    steps = []
    for k, end in enumerate(levels[1:]):
        level, is_last = levels[k] * factor, k == len(levels) - 2
        h = math.log(level / end)
        both = 1 - math.exp(-h)
        now = both + (0 if k == 0 else h / math.log(steps[-1].level / level) * (1 - both / h))
        steps.append(EdmStep(level, math.exp(-h), now, both - now, 0.0 if is_last else std(end)))
    return steps


def sample_edm(predict, noise, levels, steps, s_churn, step_noise):
    """Return (clean latents, denoiser inputs of each step). step_noise: function from a step's index to its noise."""
    x = levels[0] * noise + churn(levels, s_churn)[1](levels[0]) * step_noise(-1)
    states, before = [], 0.0
    for k, step in enumerate(steps):
        states.append(x / (1 + step.level))
        clean = states[-1] - step.sigma * predict(states[-1], step.sigma)
        x = step.keep * x + step.now * clean + step.before * before
        x, before = x + (step.std * step_noise(k) if step.std else 0), clean
    last = levels[-1]
    latents = x / (1 + last)
    return latents - last / (1 + last) * predict(latents, last / (1 + last)), states
