"""Asynchronous copies between CPU and GPU through pinned memory.

A copy from pageable memory blocks the CPU until the GPU has finished all queued work. A copy from pinned memory does
not. The caller may release the pinned source tensor at once, because torch does not reuse its memory before the copy is
done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy the tensor to a device without waiting. The copy is queued on the current stream."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def lists_to_device(device: torch.device | str, *values: Sequence[float]) -> Sequence[Tensor]:
    """Copy lists of length B to a device, all in one copy. Returns one float32 tensor [B] per list."""
    return copy_to_device(torch.tensor(values, dtype=torch.float32), device).unbind()


def offload_tensor(tensor: Tensor) -> Tensor:
    """Copy the tensor to pinned CPU memory without waiting.

    Read it only through `copy_to_device` on the same stream: the copy may still be in progress.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def free_memory(device: torch.device, fraction: float, default: int = 0) -> int:
    """Return `fraction` of the GPU's free memory, in bytes. For other devices return `default`."""
    return int(fraction * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else default


class OffloadBuffer:
    """Stores tensors for later use: on the GPU up to a budget of `num_bytes`, after that in pinned CPU memory."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes

    def store(self, tensor: Tensor) -> Tensor:
        """Store the tensor and return the stored one. Read it with `copy_to_device`."""
        if tensor.nbytes > self._free:
            return offload_tensor(tensor)
        self._free -= tensor.nbytes
        return tensor
