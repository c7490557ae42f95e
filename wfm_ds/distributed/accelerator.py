"""Detects accelerators and enables deterministic kernels. Importing this module does not import torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.distributed.ranks import find_launched_rank
from wfm_ds.errors import RecipeError

if TYPE_CHECKING:
    import torch

DEVICE_NODES = (
    *("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "dri/renderD*"),  # dxg: CUDA under WSL; kfd: AMD
    *("accel[0-9]*", "accel/*", "davinci*", "hl[0-9]*"),
)
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # values for which cuBLAS documents reproducible results


def is_accelerator_present(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has a GPU or another accelerator, according to its device files."""
    return any(next(devices.glob(pattern), None) is not None for pattern in DEVICE_NODES)


def uses_cuda() -> bool:
    """Return whether CUDA is available and DS_ACCELERATOR does not name another device."""
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


def choose_accelerator() -> None:
    """Set DS_ACCELERATOR=cpu for DeepSpeed if CUDA is not available and the user has not set the variable."""
    if "DS_ACCELERATOR" not in os.environ and not uses_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes a CUDA device the thread's current device. For other devices, it does nothing."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Make torch use only deterministic kernels inside the context, if `enabled`.

    Enter the context before this process uses a GPU. Operations without a deterministic kernel raise an error. Raises
    RecipeError if the value of CUBLAS_WORKSPACE_CONFIG makes cuBLAS nondeterministic, or if the variable is not set and
    CUDA is already initialized.
    """
    if not enabled:
        yield
        return
    import torch

    configured, cudnn = os.environ.get(CUBLAS_VARIABLE), torch.backends.cudnn
    if configured is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RecipeError(
            f"engine.deterministic: CUDA was used before {CUBLAS_VARIABLE} was set; set "
            f"{CUBLAS_VARIABLE}={DETERMINISTIC_WORKSPACES[0]} in the environment"
        )
    if configured is not None and configured not in DETERMINISTIC_WORKSPACES:
        raise RecipeError(
            f"engine.deterministic: {CUBLAS_VARIABLE}={configured} makes cuBLAS nondeterministic; unset it, or set it "
            f"to {' or '.join(DETERMINISTIC_WORKSPACES)}"
        )
    torch_before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.benchmark, cudnn.deterministic
    os.environ.setdefault(CUBLAS_VARIABLE, DETERMINISTIC_WORKSPACES[0])
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True  # the benchmark may select different kernels in each process
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(torch_before[0], warn_only=torch_before[1])
        cudnn.benchmark, cudnn.deterministic = cudnn_before
        if configured is None:
            del os.environ[CUBLAS_VARIABLE]


def ranks_per_node(world_size: int) -> int:
    """Return the number of ranks on this node: `world_size` if no launcher started several ranks."""
    launched = find_launched_rank(os.environ)
    return world_size if launched is None or launched.size == 1 else launched.local_size


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def threads_per_rank() -> int:
    """Return OMP_NUM_THREADS or, if it is not set, the number of CPU cores divided by the ranks per node."""
    if "OMP_NUM_THREADS" in os.environ:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, (os.cpu_count() or 1) // ranks_per_node(1))
