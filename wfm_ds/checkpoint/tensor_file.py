"""safetensors files that are written tensor by tensor, so that no more than one of them needs to be in memory.

The header of such a file follows from names, shapes and dtypes alone, and with it the place of each tensor. What is
written is byte for byte what safetensors' own `save_file` writes, which wants all tensors of a file at once.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

# By torch's dtype: its name in the header, in the order in which tensors lie in a file.
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
RANKS = {dtype: place for place, dtype in enumerate(DTYPES)}
ALIGNMENT = 8  # bytes, of the first tensor


class Spec(NamedTuple):
    """The dtype and shape of a tensor before it is there."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


class TensorFile:
    """A new safetensors file, filled in any order and complete at the end of its `with` block.

    with TensorFile(path, {"a": Spec(torch.float32, torch.Size([2]))}) as file:
        file.write("a", torch.zeros(2))
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        """Write the header. Raises OSError, and KeyError for a dtype that such files do not have."""
        self.path, self._specs = path, dict(specs)
        # As save_file sorts: the widest first, so that every tensor is aligned.
        order = sorted(specs, key=lambda name: (RANKS[specs[name].dtype], name))
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        self._offsets: dict[str, int] = {}
        end = 0
        for name in order:
            spec, start = specs[name], end
            end += spec.nbytes
            self._offsets[name] = start
            entries[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._begin = 8 + len(text)
        self._file = path.open("xb", buffering=0)
        self._put(0, memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place; it may be on any device. Raises OSError, KeyError for a name that is not of this
        file or was written already, ValueError for another dtype or shape than was announced."""
        spec = self._specs[name]
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            found, wanted = (f"{DTYPES.get(d)} {list(s)}" for d, s in ((tensor.dtype, tensor.shape), spec))
            raise ValueError(f"{self.path}: {name} is {found}, {wanted} was announced")
        del self._specs[name]
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._put(self._begin + self._offsets[name], flat.view(torch.uint8).numpy().data)

    def _put(self, offset: int, data: memoryview) -> None:
        while data:  # one write() of a raw file takes at most 2 GiB
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush to the disk. Raises ValueError if tensors are missing, OSError."""
        with self._file:
            if kind is None:
                if self._specs:
                    raise ValueError(f"{self.path}: {len(self._specs)} tensors are missing, e.g. {min(self._specs)}")
                os.fsync(self._file.fileno())
