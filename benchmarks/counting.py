"""Launches, bytes and waits for the device, counted on a CPU: no timing, and nothing estimated from formulas."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wfm_kernels import triton_backend

# Operators that hand a value to the host: on a GPU each waits for everything before it.
SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
# Memory without work.
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


@dataclass
class Count:
    launches: int = 0  # kernels on a GPU: an operator of torch that computes or copies is one
    small_launches: int = 0  # of these, on less than a latent
    syncs: int = 0
    num_bytes: int = 0  # of all tensors that a launch reads or writes, each once a launch


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, latent_elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.latent_elements, self.count = latent_elements, Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in SYNCS:
            self.count.syncs += 1
        if not (name.startswith("wfm_kernels::") or returns_view or name in ALLOCATIONS or name == "aten::detach"):
            self.launched(tree_leaves((args, kwargs, result)))
        return result

    def launched(self, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.count.launches += 1
        self.count.small_launches += all(t.numel() < self.latent_elements for t in tensors)
        self.count.num_bytes += sum(stored_bytes(t) for t in {id(t): t for t in tensors}.values())


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes without the repeats of an expanded tensor."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * tensor.element_size()


@contextlib.contextmanager
def _launches_of_kernels(counter: _Counter) -> Iterator[None]:
    launch = triton_backend._launch_kernel

    def counted(kernel: Any, grid: tuple[int, ...], *args: Any, **keys: Any) -> None:
        counter.launched([a for a in args if isinstance(a, torch.Tensor)])
        launch(kernel, grid, *args, **keys)

    triton_backend._launch_kernel = counted
    try:
        yield
    finally:
        triton_backend._launch_kernel = launch


def count(run: Callable[[], Any], latent_elements: int) -> Count:
    """Count what `run` would do to a GPU; kernels run in Triton's interpreter (TRITON_INTERPRET=1 before imports)."""
    counter = _Counter(latent_elements)
    with _launches_of_kernels(counter), counter:
        run()
    return counter.count
