"""Reading of .npy arrays from clients, without pickle and without trusting their headers."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.web.http_problem import HttpProblem, invalid_request

MAGIC = b"\x93NUMPY"
HEADER_BYTES = 4096
MAX_DIMENSIONS = 6
DTYPES = ("uint8", "float16", "float32")


def read_npy(data: memoryview) -> npt.NDArray[Any]:
    """Return the array in .npy data, as a view that needs no memory.

    Raises HttpProblem: 415 if the data is not .npy; 422 for object arrays, dtypes outside DTYPES, Fortran order, or a
    size that does not match the header.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC:
        hint = " (this looks like torch.save)" if bytes(data[:2]) in (b"PK", b"\x80\x02") else ""
        raise HttpProblem(415, "not_npy", f"the body after the first line is not .npy{hint}: write it with numpy.save")
    head = io.BytesIO(data[: HEADER_BYTES + 16])
    try:
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(head, max_header_size=HEADER_BYTES)
    except Exception as error:
        raise invalid_request(f"the .npy header cannot be read: {' '.join(str(error).split())[:100]}") from error
    if dtype.hasobject or dtype.name not in DTYPES or not dtype.isnative:
        raise invalid_request(f"an array of {str(dtype)[:40]}; send one of {', '.join(DTYPES)}, little endian")
    if fortran or len(shape) > MAX_DIMENSIONS or not all(0 < n < 2**31 for n in shape):
        raise invalid_request(f"an array of shape {str(shape)[:80]}; send C order and at most {MAX_DIMENSIONS} axes")
    expected, actual = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
    if expected != actual:
        raise invalid_request(
            f"{actual} bytes of data, but {dtype.name} {list(shape)} has {expected}: the body is cut off or too long"
        )
    return np.frombuffer(data[head.tell() :], dtype=dtype).reshape(shape)
