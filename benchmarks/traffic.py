"""Count the bytes that a block of code sends to other ranks, for each call on this rank. Nothing is timed or estimated.

Every collective of torch.distributed reaches the dispatcher as an operator of the namespace c10d. DeepSpeed's
collectives run on the training thread, including those of backward hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator -> (kind, index of the argument with the payload). The payload is the larger side: the output of an
# all-gather, the input of a reduce-scatter, and the only tensor of other operators.
KINDS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 0),
}
WITHOUT_PAYLOAD = {"barrier", "monitored_barrier_"}
Traffic = dict[str, tuple[int, int]]  # kind -> (calls, bytes)


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager; read `traffic()` afterwards. Raises KeyError for an unknown collective."""

    def __init__(self, control_bytes: int = 0) -> None:
        """control_bytes: calls with at most this many bytes (flags, norms) are counted as "control"."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.control_bytes = control_bytes
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name not in WITHOUT_PAYLOAD:
            kind, position = KINDS[name]
            num_bytes = sum(t.numel() * t.element_size() for t in list_tensors(args[position]))
            kind = "control" if num_bytes <= self.control_bytes else kind
            self.calls[kind] += 1
            self.num_bytes[kind] += num_bytes
        return func(*args, **(kwargs or {}))

    def traffic(self) -> Traffic:
        return {kind: (self.calls[kind], self.num_bytes[kind]) for kind in sorted(self.calls)}


def list_tensors(argument: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
