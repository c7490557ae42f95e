"""Count launches, bytes and host synchronizations on a CPU. Nothing is timed or estimated from formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wfm_kernels import triton_backend

# Operators that return a value to the host: on a GPU each waits for all earlier work.
SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
# Operators that only allocate memory.
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


@dataclass
class LaunchCount:
    launches: int = 0  # GPU kernels: each torch operator that computes or copies counts as one
    small_launches: int = 0  # launches on tensors smaller than a latent
    syncs: int = 0
    num_bytes: int = 0  # of all tensors that a launch reads or writes; each tensor counts once for each launch


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, latent_elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.latent_elements, self.count = latent_elements, LaunchCount()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in SYNCS:
            self.count.syncs += 1
        if not (name.startswith("wfm_kernels::") or returns_view or name in ALLOCATIONS or name == "aten::detach"):
            self.record_launch(tree_leaves((args, kwargs, result)))
        return result

    def record_launch(self, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.count.launches += 1
        self.count.small_launches += all(t.numel() < self.latent_elements for t in tensors)
        self.count.num_bytes += sum(storage_bytes(t) for t in {id(t): t for t in tensors}.values())


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, without the repeats of an expanded tensor."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * tensor.element_size()


def count_launches(run: Callable[[], Any], latent_elements: int) -> LaunchCount:
    """Count the GPU work of `run`. Kernels run in Triton's interpreter: set TRITON_INTERPRET=1 before imports."""
    counter, launch = _Counter(latent_elements), triton_backend._launch_kernel

    def count_and_launch(kernel: Any, grid: tuple[int, ...], *args: Any, **keys: Any) -> None:
        counter.record_launch([a for a in args if isinstance(a, torch.Tensor)])
        launch(kernel, grid, *args, **keys)

    with patch.object(triton_backend, "_launch_kernel", count_and_launch), counter:
        run()
    return counter.count
