"""Detect the accelerator of this machine and whether this process uses it, consistently with DeepSpeed.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_NODES = (
    *("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*"),  # dxg: CUDA under WSL; kfd: AMD
    *("accel[0-9]*", "accel/*", "davinci*", "hl[0-9]*"),
)


def is_accelerator_present(devices: Path = Path("/dev")) -> bool:
    """Return whether a device node of a GPU or another accelerator exists. Does not import torch."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_NODES)


def uses_cuda() -> bool:
    """Return whether this process computes on GPUs: CUDA is available and DS_ACCELERATOR names no other device."""
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def choose_accelerator() -> None:
    """Make DeepSpeed use the CPU if there is no CUDA device. A DS_ACCELERATOR set by the user is kept."""
    if "DS_ACCELERATOR" not in os.environ and not uses_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"


def device_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes this device the thread's current one, for libraries, kernels and streams.

    A new thread starts with GPU 0 as its current device.
    """
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
