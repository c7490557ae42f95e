"""The choice of the terms that are trained on, and their order: permutations that follow from a key."""

from __future__ import annotations

from wfm_ds.recipe.algorithms import num_of_share
from wfm_ds.seeds import derive_seed


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
    return keyed_permutation(num_steps, seed, "trained_steps")[: num_of_share(num_steps, fraction)]
