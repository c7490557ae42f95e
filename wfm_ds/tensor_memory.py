"""Asynchronous copies between CPU and GPU through pinned memory, and stores of tensors with a limited size.

A copy from pinned memory does not wait until the GPU has finished all queued work. The caller may release the source
tensor at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

TensorRow: TypeAlias = dict[str, Tensor]
"""The conditioning of one text, image or video: {name: tensor [1, ...]}."""


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting, on the current stream."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def lists_to_device(device: torch.device | str, *values: Sequence[float]) -> Sequence[Tensor]:
    """Return a float32 tensor [B] on the device for each list of B numbers. Uses a single copy for all lists."""
    return copy_to_device(torch.tensor(values, dtype=torch.float32), device).unbind()


def offload_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned CPU memory without waiting.

    The copy may still be in progress, so read the result only with `copy_to_device` on the same stream.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned CPU memory, and wait until the copy is complete."""
    copy = offload_tensor(tensor)
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def free_memory(device: torch.device, fraction: float, default: int = 0) -> int:
    """Return `fraction` of the GPU's free memory in bytes. For other devices, return `default`."""
    return int(fraction * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else default


class OffloadBuffer:
    """Stores tensors for later use: up to `num_bytes` on the GPU, and all further tensors in pinned CPU memory."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes

    def store(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its copy in pinned CPU memory if the GPU budget is used up.

        Read it with `copy_to_device`.
        """
        if tensor.nbytes > self._free:
            return offload_tensor(tensor)
        self._free -= tensor.nbytes
        return tensor


class TensorLru:
    """A cache of tensors. It evicts the least recently used ones when it exceeds `max_bytes` bytes.

    The most recently used entry is kept even if it alone is too large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._rows: OrderedDict[Hashable, TensorRow] = OrderedDict()

    def get(self, key: Hashable) -> TensorRow | None:
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def put(self, rows: Mapping[Hashable, TensorRow]) -> None:
        for key, row in rows.items():
            self._bytes += num_bytes(row)
            self._rows[key] = row
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= num_bytes(oldest)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows


def num_bytes(row: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in row.values())
