"""Detect whether this machine has an accelerator and whether this process uses it, consistently with DeepSpeed.

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
    """Return whether this machine has a GPU or another accelerator, by its device nodes. Does not import torch."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_NODES)


def uses_cuda() -> bool:
    """Return whether CUDA is available and DS_ACCELERATOR does not name another device."""
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def choose_accelerator() -> None:
    """Set DS_ACCELERATOR=cpu for DeepSpeed if CUDA is not available and the user has not set the variable."""
    if "DS_ACCELERATOR" not in os.environ and not uses_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"


def device_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes this device the thread's current one. A new thread starts with GPU 0."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
