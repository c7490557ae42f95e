"""Copies between host and device for which neither waits: through pinned memory where the device is a GPU.

A copy out of pageable memory stops the host until the device has done all that was asked of it before. The pinned block
of a copy is not given to anyone else before the copy is done, so nobody needs to keep it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor there, after what the current stream was asked to do before."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def columns(device: torch.device | str, *values: Sequence[float]) -> Sequence[Tensor]:
    """Each of these equally long lists as [B] float32 there: one copy for all."""
    return on_device(torch.tensor(values, dtype=torch.float32), device).unbind()


def aside(tensor: Tensor) -> Tensor:
    """The tensor on the host, to be brought back by `on_device` of the same stream; nobody else may read it, for the
    copy may still be under way."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def room(device: torch.device, share: float, otherwise: int = 0) -> int:
    """Bytes in this share of the GPU's memory that nobody has reserved yet; `otherwise` of another device."""
    return int(share * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else otherwise


class Shelf:
    """Place for tensors that are needed later: the device, while they have room there, then the host."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes

    def put(self, tensor: Tensor) -> Tensor:
        """The same numbers, to be brought back by `on_device`."""
        if tensor.nbytes > self._free:
            return aside(tensor)
        self._free -= tensor.nbytes
        return tensor
