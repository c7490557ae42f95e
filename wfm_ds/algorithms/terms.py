"""The choice of the terms that are trained on, and their order: permutations and noise levels that follow from a
key."""

from __future__ import annotations

import torch

from wfm_ds.recipe.algorithms import num_of_share
from wfm_ds.sampling.schedule import shifted
from wfm_ds.seeds import derive_seed, uniform

EDGE = 2.0**-33  # draws keep this distance from 0 and 1: sigma 0 has no velocity to learn


def keyed_permutation(count: int, run_seed: int, purpose: str, *key: int | str) -> list[int]:
    """0 .. count-1 in an order drawn from (run seed, purpose, key), uniform over all orders."""
    # Sorting hashes: no generator whose stream another version of a library may change.
    return sorted(range(count), key=lambda i: derive_seed(run_seed, purpose, *key, i))


def trained_step_indices(num_steps: int, fraction: float, seed: int) -> list[int]:
    """The denoise steps whose noise levels one sample is trained on, in the order of training.

    num_of_share(num_steps, fraction) of 0 .. num_steps-1, drawn without replacement from `seed`, which must differ by
    sample and RL step; every index is eligible, the last too. Raises ValueError for a fraction outside (0, 1].
    """
    if num_steps < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"cannot train the share {fraction} of {num_steps} steps: need a share in (0, 1] of at least 1"
        )
    return drawn_steps(num_steps, num_of_share(num_steps, fraction), seed)


def drawn_steps(num_steps: int, count: int, seed: int) -> list[int]:
    """`count` of the numbers 0 .. num_steps-1, drawn without replacement from `seed`, in the order of the draw."""
    return keyed_permutation(num_steps, seed, "trained_steps")[:count]


def stratified_sigmas(num_levels: int, shift: float, run_seed: int, *key: int | str) -> list[float]:
    """One noise level for each of num_levels equal parts of (0, 1), ascending: q uniform in its part, then shifted.

    Each is a float32 number in (0, 1]: what the denoiser is asked at is what its expert is chosen by. Over the draws
    their density is that of all parts together, whatever num_levels is. They follow from (run_seed, key) alone.
    """
    draws = [(part + uniform(run_seed, "train_sigma", *key, part)) / num_levels for part in range(num_levels)]
    q = torch.tensor(draws, dtype=torch.float64).clamp(EDGE, 1 - EDGE)
    return shifted(q, shift).float().tolist()
