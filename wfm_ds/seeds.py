"""Derive seeds and random orders from keys instead of global state, so that a run does not depend on the world size."""

from __future__ import annotations

import hashlib

MAX_SEED = 2**64 - 1  # of torch's generators


def derive_seed(run_seed: int, purpose: str, *key: int | str) -> int:
    """Return a seed in [0, 2**63): a BLAKE2b hash of (run seed, purpose, key).

    purpose: name of the use, such as initial noise. Different purposes get independent random numbers.
    """
    text = "\x1f".join([str(run_seed), purpose, *(str(part) for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw_uniform(run_seed: int, purpose: str, *key: int | str) -> float:
    """Return a uniform random number in [0, 1) derived from (run seed, purpose, key)."""
    return derive_seed(run_seed, purpose, *key) / 2**63


def draw_permutation(count: int, run_seed: int, purpose: str, *key: int | str) -> list[int]:
    """Return a uniformly random permutation of 0 .. count-1. Equal arguments give equal permutations."""
    # Sort by hashes: random generators may change between library versions.
    return sorted(range(count), key=lambda i: derive_seed(run_seed, purpose, *key, i))
