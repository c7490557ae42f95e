"""JSON encoding of small named arrays, such as the actions of a sample."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = Mapping[str, npt.NDArray[np.float32]]

FLOAT32 = np.dtype("<f4")
MAX_RANK = 8


def pack_arrays(arrays: Arrays) -> dict[str, list[Any]]:
    """Encode float32 arrays losslessly as {name: [shape, base64 text of the little-endian bytes]}."""
    return {
        name: [list(array.shape), base64.b64encode(np.ascontiguousarray(array, dtype=FLOAT32).tobytes()).decode()]
        for name, array in arrays.items()
    }


def unpack_arrays(packed: Any) -> dict[str, npt.NDArray[np.float32]]:
    """Decode the output of `pack_arrays`. Raises ValueError if the input is invalid."""
    if not isinstance(packed, dict):
        raise ValueError("arrays must be a map")
    return {str(name): _unpack_array(name, value) for name, value in packed.items()}


def _unpack_array(name: Any, value: Any) -> npt.NDArray[np.float32]:
    shape, text = value if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if not isinstance(shape, list | tuple) or len(shape) > MAX_RANK or not isinstance(text, str):
        raise ValueError(f"{name}: expected [shape, base64 text]")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name}: invalid shape {shape}")
    content = base64.b64decode(text, validate=True)
    if len(content) != FLOAT32.itemsize * math.prod(shape):
        raise ValueError(f"{name}: {len(content)} bytes do not match shape {list(shape)}")
    return np.frombuffer(content, dtype=FLOAT32).astype(np.float32).reshape(shape)
