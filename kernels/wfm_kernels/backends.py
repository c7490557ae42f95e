"""Choice of the backend of a call: made in Python from devices, dtypes and the environment, never from values."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from wfm_kernels.checks import EXACT

log = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "triton", "torch"]
NAMES = ("auto", "triton", "torch")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
MAX_SAMPLES = 65_535  # the second dimension of a launch grid
# Element indices are int32; the last program of a sample may start up to a grid of tiles past its end.
MAX_ELEMENTS = 2**31 - 2**21


def use_triton(backend: Backend, latents: Tensor, *others: Tensor | None) -> bool:
    """Return whether the Triton kernels do this call. The environment variable WFM_KERNELS wins over `backend`.

    Raises ValueError for an unknown name, for tensors of several devices, and where `triton` is asked for and cannot
    be; `auto` then takes torch and says so once. On a CPU `auto` is always torch.
    """
    tensors = [latents, *(tensor for tensor in others if tensor is not None)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    name = _named(backend)
    if name == "torch" or (name == "auto" and latents.device.type != "cuda"):
        return False
    obstacle = _obstacle(latents, tensors)
    if obstacle and name == "triton":
        raise ValueError(f"the triton backend cannot run: {obstacle}")
    if obstacle and not torch.compiler.is_compiling():  # a traced call cannot log
        _warn_once(obstacle)
    return obstacle is None


def _named(backend: str) -> Backend:
    name = os.environ.get("WFM_KERNELS", "") or backend
    if name not in NAMES:
        raise ValueError(f"{name!r} is no backend of the kernels; there are {', '.join(NAMES)}")
    return cast(Backend, name)


def _obstacle(latents: Tensor, tensors: list[Tensor]) -> str | None:
    n = latents.numel() // len(latents)
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if latents.device.type != "cuda" and not interpreted():
        return f"the tensors are on {latents.device}; only tests run it elsewhere, by TRITON_INTERPRET=1"
    if any(tensor.dtype == EXACT and tensor.shape == latents.shape for tensor in tensors):
        return "latents are float64"
    if n > MAX_ELEMENTS or len(latents) > MAX_SAMPLES:
        return f"{len(latents)} samples of {n} elements; at most {MAX_SAMPLES} of {MAX_ELEMENTS}"
    return None


def interpreted() -> bool:
    """Return whether Triton runs its kernels in Python. It decides when a kernel is defined, so set this before any
    import."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _warn_once(obstacle: str) -> None:
    log.warning("fused kernels are off, eager torch computes instead: %s", obstacle)
