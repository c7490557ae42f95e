"""Peak TFLOP/s of GPUs by device name, for dense matrix products, from the manufacturers' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Peak TFLOP/s of one device for each number format, with accumulation in float32."""

    bfloat16: float
    tf32: float
    float32: float


# Each row contains words of a device name and the device's peak. A row matches a name that contains all of its words.
# The first matching row wins, so specific rows come first.
DEVICE_PEAKS = (
    ({"B200"}, DevicePeak(2250.0, 1125.0, 75.0)),
    ({"H200", "NVL"}, DevicePeak(835.5, 417.5, 60.0)),
    ({"H200"}, DevicePeak(989.4, 494.7, 66.9)),
    ({"GH200"}, DevicePeak(989.4, 494.7, 66.9)),
    ({"H100", "PCIe"}, DevicePeak(756.0, 378.0, 51.2)),
    ({"H100", "NVL"}, DevicePeak(835.5, 417.5, 60.0)),
    ({"H100"}, DevicePeak(989.4, 494.7, 66.9)),
    ({"H800"}, DevicePeak(989.4, 494.7, 66.9)),
    ({"H20"}, DevicePeak(148.0, 74.0, 44.0)),
    ({"A100"}, DevicePeak(312.0, 156.0, 19.5)),
    ({"A800"}, DevicePeak(312.0, 156.0, 19.5)),
    ({"L40S"}, DevicePeak(362.0, 183.0, 91.6)),
    ({"L4"}, DevicePeak(121.0, 60.0, 30.3)),
    ({"A10"}, DevicePeak(125.0, 62.5, 31.2)),
    ({"A10G"}, DevicePeak(70.0, 35.0, 31.2)),
    ({"RTX", "4090"}, DevicePeak(165.2, 82.6, 82.6)),
    ({"MI300X"}, DevicePeak(1307.4, 653.7, 163.4)),
)


def find_peak(name: str) -> DevicePeak | None:
    """Return the peak of the device with this name (`torch.cuda.get_device_name`), or None if it is unknown."""
    words = set(re.split(r"[\s\-]+", name))
    if "Laptop" in words:  # a different chip with the same name
        return None
    return next((peak for required, peak in DEVICE_PEAKS if required <= words), None)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak TFLOP/s of the device's matrix products in this dtype, or None if it is unknown."""
    peak = find_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    if dtype == torch.bfloat16:
        return peak.bfloat16
    return peak.tf32 if torch.backends.cuda.matmul.allow_tf32 else peak.float32
