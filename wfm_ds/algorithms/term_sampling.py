"""Random choice of training steps, noise levels and orders. Each draw is a function of the run seed and a key."""

from __future__ import annotations

import torch

from wfm_ds.recipe.algorithms import count_of_fraction
from wfm_ds.sampling.schedule import apply_shift
from wfm_ds.seeds import derive_seed, draw_uniform

QUANTILE_MARGIN = 2.0**-33  # draws keep this distance from 0 and 1: no velocity can be learned at sigma 0


def draw_permutation(count: int, run_seed: int, purpose: str, *key: int | str) -> list[int]:
    """Return a uniformly random permutation of 0 .. count-1. Depends only on the arguments."""
    # Sort by hashes: random generators may change between library versions.
    return sorted(range(count), key=lambda i: derive_seed(run_seed, purpose, *key, i))


def draw_training_steps(num_steps: int, fraction: float, seed: int) -> list[int]:
    """Return the denoising steps that one sample is trained on, in training order.

    Draws count_of_fraction(num_steps, fraction) of the steps 0 .. num_steps-1. seed must differ between samples and RL
    steps. Raises ValueError for a fraction outside (0, 1].
    """
    if num_steps < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"cannot train on fraction {fraction} of {num_steps} steps: need a fraction in (0, 1] and at least 1 step"
        )
    return draw_steps(num_steps, count_of_fraction(num_steps, fraction), seed)


def draw_steps(num_steps: int, count: int, seed: int) -> list[int]:
    """Return `count` different steps from 0 to num_steps - 1 in random order. Depends only on the arguments."""
    return draw_permutation(num_steps, seed, "trained_steps")[:count]


def draw_stratified_sigmas(num_levels: int, shift: float, run_seed: int, *key: int | str) -> list[float]:
    """Draw one noise level per stratum of (0, 1), ascending: q is uniform in its stratum and then shifted.

    Values are float32 in (0, 1], as the denoiser gets them, so that both choose the same expert. The overall density
    does not depend on num_levels. Depends only on the arguments.
    """
    draws = [(part + draw_uniform(run_seed, "train_sigma", *key, part)) / num_levels for part in range(num_levels)]
    q = torch.tensor(draws, dtype=torch.float64).clamp(QUANTILE_MARGIN, 1 - QUANTILE_MARGIN)
    return apply_shift(q, shift).float().tolist()
