"""The accelerator of this machine, if it has one, and the one that DeepSpeed is told. Costs no import of torch at
first."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_NODES = (
    *("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*"),  # dxg: CUDA under WSL; kfd: AMD
    *("accel[0-9]*", "accel/*", "davinci*", "hl[0-9]*"),
)


def accelerator_present(devices: Path = Path("/dev")) -> bool:
    """Return whether any device node of a GPU or another accelerator exists. Costs no import of torch."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_NODES)


def choose_accelerator() -> None:
    """Tell DeepSpeed to use the CPU if there is no CUDA device; a user's own DS_ACCELERATOR stays."""
    import torch

    if "DS_ACCELERATOR" not in os.environ and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
