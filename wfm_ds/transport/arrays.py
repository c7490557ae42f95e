"""Encodings of arrays that belong to a sample: small ones, such as actions, as JSON, and sound as further frames."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

FLOAT32, UINT8 = np.dtype("<f4"), np.dtype("u1")
MAX_RANK = 8


def pack_arrays(arrays: Arrays) -> dict[str, list[Any]]:
    """Encode arrays losslessly as {name: [shape, base64 text of the little-endian bytes]}.

    Arrays are float32 or uint8. The list of a uint8 array has the third item "uint8".
    """
    return {name: _pack_array(array) for name, array in arrays.items()}


def _pack_array(array: npt.NDArray[Any]) -> list[Any]:
    dtype = UINT8 if array.dtype == UINT8 else FLOAT32
    content = base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()
    return [list(array.shape), content, *([UINT8.name] if dtype == UINT8 else [])]


def unpack_arrays(packed: Any) -> dict[str, npt.NDArray[Any]]:
    """Decode the output of `pack_arrays`. Raises ValueError if the input is invalid."""
    if not isinstance(packed, dict):
        raise ValueError("arrays must be a map")
    return {str(name): _unpack_array(name, value) for name, value in packed.items()}


def _unpack_array(name: Any, value: Any) -> npt.NDArray[Any]:
    is_list = isinstance(value, list | tuple)
    dtype = UINT8 if is_list and len(value) == 3 and value[2] == UINT8.name else FLOAT32
    shape, text = value[:2] if is_list and len(value) == (3 if dtype == UINT8 else 2) else (None, None)
    if not isinstance(shape, list | tuple) or len(shape) > MAX_RANK or not isinstance(text, str):
        raise ValueError(f"{name}: expected [shape, base64 text]")
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name}: invalid shape {shape}")
    content = base64.b64decode(text, validate=True)
    if len(content) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{name}: {len(content)} bytes do not match shape {list(shape)}")
    return np.frombuffer(content, dtype=dtype).astype(dtype.newbyteorder("=")).reshape(shape)


def append_sound(video: npt.NDArray[np.uint8], sound: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the video [T,H,W,3] and, in further frames, the bytes of the sound float32 [channels, samples]."""
    content, size = np.ascontiguousarray(sound, FLOAT32).reshape(-1).view(UINT8), math.prod(video.shape[1:])
    frames = np.zeros((-(-content.size // size), *video.shape[1:]), UINT8)
    frames.reshape(-1)[: content.size] = content
    return np.concatenate([video, frames])


def split_sound(shape: Any, video: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Undo `append_sound`. shape: [channels, samples]. Raises ValueError if it does not fit the array."""
    if not isinstance(shape, list | tuple) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"the sound must have a shape [channels, samples], got {shape!r:.50}")
    num_bytes = FLOAT32.itemsize * math.prod(shape)
    count = -(-num_bytes // math.prod(video.shape[1:]))
    if video.ndim != 4 or count >= len(video):
        raise ValueError(f"a sound of shape {list(shape)} does not fit an array of shape {list(video.shape)}")
    content = video[-count:].reshape(-1)[:num_bytes]
    return video[:-count], np.frombuffer(content.tobytes(), FLOAT32).astype(np.float32).reshape(shape)
