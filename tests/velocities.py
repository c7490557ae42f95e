"""Velocities given by formulas, and noise levels, for tests of solvers."""

import torch

from wfm_ds.sampling.plan import apply_shift


def wavy(x, sigma):
    return torch.sin(3 * x) + sigma * x - 0.3


def gaussian(mean, std):
    """Return the exact velocity of data N(mean, std^2)."""

    def velocity(x, sigma):
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        return (sigma - (1 - sigma) * std**2) / variance * (x - (1 - sigma) * mean) - mean

    return velocity


def grid(*values):
    return torch.tensor(values, dtype=torch.float64)


def shift_three(num_steps):
    return apply_shift(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), 3.0)
