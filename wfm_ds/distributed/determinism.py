"""`engine.deterministic`: kernels that give equal bits each time, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from wfm_ds.errors import RecipeError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")  # workspaces with which cuBLAS promises equal bits, by its documentation


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch takes deterministic kernels alone, and raises for an operation that has none; all is as before
    afterwards. Enter it before the first work on a GPU.

    Raises RecipeError if the environment asks cuBLAS for something else, or CUDA was used too early to be asked.
    """
    if not wanted:
        yield
        return
    import torch

    given, cudnn = os.environ.get(CUBLAS), torch.backends.cudnn
    if given is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RecipeError(
            f"engine.deterministic: CUDA was used before {CUBLAS} could be set: set it to {FIXED[0]} in the environment"
        )
    if given is not None and given not in FIXED:
        raise RecipeError(
            f"engine.deterministic: {CUBLAS}={given} lets cuBLAS give other bits each time: unset it, or set it to "
            f"{' or '.join(FIXED)}"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    of_cudnn = cudnn.benchmark, cudnn.deterministic
    os.environ.setdefault(CUBLAS, FIXED[0])
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True  # which convolution is fastest differs from start to start
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = of_cudnn
        if given is None:
            del os.environ[CUBLAS]
