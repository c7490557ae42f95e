"""`engine.deterministic`: bitwise reproducible kernels in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from wfm_ds.errors import RecipeError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # values for which cuBLAS documents reproducible results


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Make torch use only deterministic kernels inside the context, if `enabled`.

    Enter it before this process uses a GPU. Operations without a deterministic kernel raise an error. Raises
    RecipeError if CUBLAS_WORKSPACE_CONFIG has a value with which cuBLAS is nondeterministic, or if it is unset although
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
            f"engine.deterministic: {CUBLAS_VARIABLE}={configured} makes cuBLAS nondeterministic; unset it, or "
            "set it to "
            f"{' or '.join(DETERMINISTIC_WORKSPACES)}"
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
