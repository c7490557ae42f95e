"""Safe reading of numeric arrays from untrusted .npy files."""

from __future__ import annotations

import tokenize
from typing import IO, Any

import numpy as np

from wfm_ds.data.trajectories import Floats, is_numeric

# Errors that numpy raises for damaged files.
DAMAGED_ERRORS = (
    ValueError,
    EOFError,
    SyntaxError,
    tokenize.TokenError,
    MemoryError,
    OverflowError,
    TypeError,
    LookupError,
)


def read_npy(file: IO[bytes]) -> Floats:
    """Read an array of real numbers as float32. Raises ValueError for invalid content and OSError for read errors."""
    try:
        array = np.lib.format.read_array(file, allow_pickle=False)
    except DAMAGED_ERRORS as error:
        raise ValueError("damaged, or not an .npy file of numbers") from error
    return to_float32(array)


def to_float32(array: Any) -> Floats:
    """Convert an array of real numbers to float32. Raises ValueError for anything else."""
    if not is_numeric(array):
        raise ValueError("not an array of real numbers")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which callers reject
        converted: Floats = array.astype(np.float32)
    return converted
