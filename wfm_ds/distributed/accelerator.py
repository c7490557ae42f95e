"""The accelerator of this machine, if it has one, and whether this process computes on it: one answer for DeepSpeed and
for all of this project. Costs no import of torch at first."""

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


def accelerator_present(devices: Path = Path("/dev")) -> bool:
    """Return whether any device node of a GPU or another accelerator exists. Costs no import of torch."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_NODES)


def uses_cuda() -> bool:
    """Return whether this process computes on GPUs: it has some, and DS_ACCELERATOR, which DeepSpeed obeys, does not
    name another device."""
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def choose_accelerator() -> None:
    """Tell DeepSpeed to use the CPU if there is no CUDA device; a user's own DS_ACCELERATOR stays."""
    if "DS_ACCELERATOR" not in os.environ and not uses_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which this device is the current one of the thread, for code that asks for no other: libraries,
    kernels, streams. A new thread's is GPU 0, whatever device its tensors are on."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
