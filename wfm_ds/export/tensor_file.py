"""Writes safetensors files tensor by tensor, so that only one tensor needs to be in memory.

The result is byte-identical to the output of safetensors' `save_file`. Format:
https://github.com/huggingface/safetensors#format
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

# {torch dtype: its name in the header}. Tensors in a file are sorted by dtype in this order.
DTYPE_NAMES = {
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
DTYPE_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_NAMES)}
ALIGNMENT = 8  # alignment of the first tensor in bytes


class StoredTensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


class TensorFile:
    """A new safetensors file. All tensors must be written within the `with` block, in any order."""

    def __init__(
        self, path: Path, specs: Mapping[str, StoredTensorSpec], metadata: Mapping[str, str], *, sync: bool = True
    ) -> None:
        """Write the header. Raises OSError if writing fails, and KeyError for an unsupported dtype.

        sync: whether to flush the file to disk at the end.
        """
        self.path, self._specs, self._sync = path, dict(specs), sync
        # The same order as save_file: the widest dtype first, so that every tensor is aligned.
        order = sorted(specs, key=lambda name: (DTYPE_ORDER[specs[name].dtype], name))
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        self._offsets: dict[str, int] = {}
        end = 0
        for name in order:
            spec, start = specs[name], end
            end += spec.nbytes
            self._offsets[name] = start
            entries[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._data_start = 8 + len(text)
        self._file = path.open("xb", buffering=0)
        self._write_bytes(0, memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor from any device to its position in the file.

        Raises OSError if writing fails, KeyError if the name is unknown or was already written, and ValueError if dtype
        or shape differ from the specification.
        """
        spec = self._specs[name]
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            actual, expected = (f"{DTYPE_NAMES.get(d)} {list(s)}" for d, s in ((tensor.dtype, tensor.shape), spec))
            raise ValueError(f"{self.path}: {name} is {actual}, expected {expected}")
        del self._specs[name]
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._write_bytes(self._data_start + self._offsets[name], flat.view(torch.uint8).numpy().data)

    def _write_bytes(self, offset: int, data: memoryview) -> None:
        while data:  # one write() to a raw file writes at most 2 GiB
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. Raises ValueError if tensors are missing, and OSError if writing fails."""
        with self._file:
            if kind is None:
                if self._specs:
                    raise ValueError(f"{self.path}: {len(self._specs)} tensors are missing, e.g. {min(self._specs)}")
                if self._sync:
                    os.fsync(self._file.fileno())
