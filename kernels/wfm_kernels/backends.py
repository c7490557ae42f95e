"""Selection of the backend for a call, from devices, dtypes and the environment, without reading tensor values."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from wfm_kernels.checks import EXACT_DTYPE

log = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "triton", "torch"]
BACKEND_NAMES = ("auto", "triton", "torch")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
MAX_SAMPLES = 65_535  # limit of the second dimension of a launch grid
# Element indices are int32, and the last program of a sample may start up to a grid of tiles past its end.
MAX_ELEMENTS = 2**31 - 2**21


def should_use_triton(backend: Backend, latents: Tensor, *others: Tensor | None) -> bool:
    """Return whether to use the Triton backend. The environment variable WFM_KERNELS overrides `backend`.

    `auto` uses Triton for CUDA tensors if possible, else torch, with one warning. Raises ValueError for an unknown
    name, for tensors on several devices, and if `triton` is requested but cannot run.
    """
    tensors = [latents, *(tensor for tensor in others if tensor is not None)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
    name = _resolve_backend(backend)
    if name == "torch" or (name == "auto" and latents.device.type != "cuda"):
        return False
    obstacle = _find_obstacle(latents, tensors)
    if obstacle and name == "triton":
        raise ValueError(f"the triton backend cannot run: {obstacle}")
    if obstacle and not torch.compiler.is_compiling():  # a traced call cannot log
        _warn_once(obstacle)
    return obstacle is None


def _resolve_backend(backend: str) -> Backend:
    name = os.environ.get("WFM_KERNELS", "") or backend
    if name not in BACKEND_NAMES:
        raise ValueError(f"unknown kernel backend {name!r}; choose one of {', '.join(BACKEND_NAMES)}")
    return cast(Backend, name)


def _find_obstacle(latents: Tensor, tensors: list[Tensor]) -> str | None:
    n = latents.numel() // len(latents)
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if latents.device.type != "cuda" and not is_interpreted():
        return f"the tensors are on {latents.device}, not on CUDA (tests use TRITON_INTERPRET=1)"
    if any(tensor.dtype == EXACT_DTYPE and tensor.shape == latents.shape for tensor in tensors):
        return "latents are float64"
    if n > MAX_ELEMENTS or len(latents) > MAX_SAMPLES:
        return f"{len(latents)} samples of {n} elements exceed the limit of {MAX_SAMPLES} samples of {MAX_ELEMENTS}"
    return None


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels in Python (TRITON_INTERPRET=1, set before importing the kernels)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _warn_once(obstacle: str) -> None:
    log.warning("fused kernels are disabled, using eager torch: %s", obstacle)
