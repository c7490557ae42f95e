"""Seeds derived from keys instead of global state: a recipe gives the same run at any world size."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *key: int | str) -> int:
    """Return a seed in [0, 2**63): BLAKE2b of (run seed, purpose, key).

    `purpose` separates random numbers of one sample (initial noise, training noise, timesteps, caption dropout, ...).
    """
    text = "\x1f".join([str(run_seed), purpose, *(str(part) for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw_uniform(run_seed: int, purpose: str, *key: int | str) -> float:
    """Return a random number in [0, 1) determined by the key."""
    return derive_seed(run_seed, purpose, *key) / 2**63
