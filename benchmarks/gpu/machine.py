"""The machine of a day: device, software, and peak rates."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks import report, timing
from benchmarks.gpu import runs

PACKAGES = ("deepspeed", "diffusers", "peft", "transformers", "torch", "triton", "pyzmq")
QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=8192, help="size of the square matrices for the peak rate")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    from deepspeed.accelerator import get_accelerator

    device = runs.join_world().device
    about = (
        report.describe_machine()
        | {name: report.package_version(name) for name in PACKAGES}
        | {"nvidia-smi": nvidia_smi()}
    )
    about["deepspeed accelerator"] = get_accelerator()._name
    if device.type == "cuda":
        about["copy GB/s"] = timing.copy_gbps()
    about["cuDNN"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    about["torch's attention"] = chosen_attention(device)
    about["bfloat16 TFLOP/s"] = matmul_tflops(args.size, device)
    return [{"what": name, "found": value} for name, value in about.items()]


def chosen_attention(device: torch.device) -> str:
    """Return the kernel of `model.attention: native` for SD3.5: CUDNN_ATTENTION on Hopper if cuDNN is new enough."""
    query = torch.randn(1, 24, 1357, 64, device=device, dtype=torch.bfloat16)
    return str(SDPBackend(torch._fused_sdp_choice(query, query, query)).name)


def nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def matmul_tflops(size: int, device: torch.device) -> float:
    """Return the TFLOP/s of a square matrix product, a measured alternative to the data sheet's peak."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / median_s(lambda: a @ b) / 1e12


def median_s(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call, after a warm-up call."""
    return statistics.median([runs.time_call(call) for _ in range(1 + repeats)][1:])
