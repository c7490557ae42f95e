"""Simulate the other ranks: process groups in which every other rank sends the same data as this one.

NCCL accepts only device tensors, gloo only host tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from benchmarks.rehearsal.record import Record
from wfm_ds.distributed.ranks import find_launched_rank

DEVICE_OF = {"nccl": "cuda", "gloo": "cpu"}


class WrongDevice(RuntimeError):
    """A backend received a tensor on a device that it does not support."""


class Ranks:
    """Process groups by name, with the requested backend of each."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.backends: dict[str, str] = {}

    def run_collective(self, func: Any, args: Any) -> Any:
        """Run an operator of torch.distributed as if all ranks had passed the same arguments."""
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        name, backend = func._schema.name.removeprefix("c10d::"), self.backends[group.group_name]
        work = FakeWork()
        work_so = dist.Work.boxed(work)
        if name.startswith("barrier"):
            self.record.add_collective(name, backend, "-", "-")
            return work_so
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.device.type != DEVICE_OF[backend]:
                raise WrongDevice(
                    f"{backend} cannot {name} a tensor of {list(tensor.shape)} {tensor.dtype} on {tensor.device}: "
                    f"it needs tensors on {DEVICE_OF[backend]}"
                )
        self.record.add_collective(name, backend, tensors[0].device.type, str(tensors[0].dtype).removeprefix("torch."))
        if not isinstance(tensors[0], FakeTensor):
            fill_outputs(name, args, group.size())
        return (args[0], work_so) if len(func._schema.returns) == 2 else work_so

    def init_process_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
            launched = find_launched_rank(os.environ)
            assert launched is not None  # fake_gpus sets the variables
            original(backend="fake", rank=launched.rank, world_size=launched.size, store=FakeStore())
            self.backends[c10d._get_default_group().group_name] = backend

        return init_process_group

    def new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            backend = str(backend or self.backends[c10d._get_default_group().group_name])
            group = original(ranks, timeout, "fake", *args, **kwargs)
            if isinstance(group, dist.ProcessGroup):  # this rank is in it
                self.backends[group.group_name] = backend
            return group

        return new_group

    def get_backend(self, group: Any = None) -> str:
        return self.backends[(group or c10d._get_default_group()).group_name]


def fill_outputs(name: str, args: Any, num_ranks: int) -> None:
    """Fill host tensors with the result of a collective."""
    if name == "allreduce_" and is_sum(args):
        for tensor in args[0]:
            tensor.mul_(num_ranks)
    elif name in ("allgather_", "gather_"):
        for outputs, given in zip(args[0], args[1], strict=False):
            for output in outputs:
                output.copy_(given)
    elif name == "_allgather_base_":
        args[0].copy_(args[1].flatten().repeat(num_ranks).view(args[0].shape))
    elif name in ("alltoall_base_", "_reduce_scatter_base_"):
        args[0].flatten().copy_(args[1].flatten()[: args[0].numel()])


def is_sum(args: Any) -> bool:
    op: Any = next(a for a in args if isinstance(a, torch.ScriptObject) and "ReduceOp" in str(a._type()))
    return bool(op.op() == dist.ReduceOp.SUM)


@contextmanager
def replace_collectives(ranks: Ranks, patch: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Replace process groups of torch.distributed until the block ends."""
    for module in (dist, c10d):
        patch(module, "get_backend", ranks.get_backend)
        patch(module, "new_group", ranks.new_group(c10d_new_group))
        patch(module, "init_process_group", ranks.init_process_group(c10d_init))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


c10d_new_group, c10d_init = c10d.new_group, c10d.init_process_group
