"""Both kernel backends in one process: compiled on a GPU, interpreted elsewhere. New memory is filled with NaN."""

import pytest
import torch

triton_backend = pytest.importorskip(
    "wfm_kernels.triton_backend", reason="Triton is not installed", exc_type=ModuleNotFoundError
)


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch):
    monkeypatch.delenv("WFM_KERNELS", raising=False)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poison_memory(monkeypatch):
    """Fill new memory with NaN, so that assertions detect elements that a kernel does not write."""
    monkeypatch.setattr(
        triton_backend,
        "_empty_tensor",
        lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype, device=device),
    )
