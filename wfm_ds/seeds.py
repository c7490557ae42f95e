"""Every random draw has a key, never a global state: the same recipe gives the same run at any world size."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *key: int | str) -> int:
    """A seed in [0, 2**63) for one draw: BLAKE2b of (run seed, purpose, key).

    `purpose` separates draws of one sample (init noise, training noise, timesteps, caption dropout, data order, ...).
    """
    text = "\x1f".join([str(run_seed), purpose, *(str(part) for part in key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniform(run_seed: int, purpose: str, *key: int | str) -> float:
    """One draw from [0, 1), by key."""
    return derive_seed(run_seed, purpose, *key) / 2**63
