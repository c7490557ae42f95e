"""Arrays of numbers in .npy files, which anyone may have written or damaged."""

from __future__ import annotations

import tokenize
from typing import IO, Any

import numpy as np

from wfm_ds.data.trajectories import Floats, is_numeric

# What numpy raises for damaged content, by where the damage is.
DAMAGED = (ValueError, EOFError, SyntaxError, tokenize.TokenError, MemoryError, OverflowError, TypeError, LookupError)


def read_npy(file: IO[bytes]) -> Floats:
    """Read an array of real numbers as float32. Raises ValueError for what is no such file, OSError where it cannot be
    read."""
    try:
        array = np.lib.format.read_array(file, allow_pickle=False)
    except DAMAGED as error:
        raise ValueError("it is damaged, or not an .npy file of numbers") from error
    return floats_of(array)


def floats_of(array: Any) -> Floats:
    """Return an array of real numbers as float32. Raises ValueError for anything else."""
    if not is_numeric(array):
        raise ValueError("it is not an array of real numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused where finite numbers are needed
        found: Floats = array.astype(np.float32)
    return found
