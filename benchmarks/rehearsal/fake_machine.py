"""Simulate a machine with GPUs and many ranks: `with fake_gpus(world_size=8) as record: ...`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.rehearsal import cuda
from benchmarks.rehearsal.device import FakeGpu
from benchmarks.rehearsal.ranks import Ranks, replace_collectives
from benchmarks.rehearsal.record import Record

GPUS_PER_NODE = 8


@contextmanager
def fake_gpus(*, world_size: int = 1, rank: int = 0) -> Iterator[Record]:
    """Simulate that this process is a rank on a machine with GPUs until the block ends. The record contains its device
    and communication events.

    DeepSpeed chooses its accelerator at import: import it, and modules that import it, only inside the block.
    """
    record = Record()
    ranks = Ranks(record)
    gpu = FakeGpu(record, ranks.run_collective)
    local = min(world_size, GPUS_PER_NODE)
    environment = {
        **{"DS_ACCELERATOR": "cuda", "RANK": str(rank), "WORLD_SIZE": str(world_size)},
        **{"LOCAL_RANK": str(rank % local), "LOCAL_SIZE": str(local)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    }
    with ExitStack() as undone:
        undone.enter_context(mock.patch.dict(os.environ, environment))

        def patch(owner: Any, name: str, value: Any) -> None:
            undone.enter_context(mock.patch.object(owner, name, value, create=True))

        cuda.patch_cuda(patch, record, rank % local, local)
        patch(fake_tensor, "init_gpu_context", lambda device: None)
        patch_tensors(patch, gpu)
        undone.enter_context(torch.autograd.set_multithreading_enabled(False))
        undone.enter_context(lift_on_host())
        undone.enter_context(replace_collectives(ranks, patch))
        undone.enter_context(gpu)
        yield record


@contextmanager
def lift_on_host() -> Iterator[None]:
    """Make torch.tensor(..., device="cuda") create a host tensor and copy it with an operator that can be recorded."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def patch_tensors(patch: Any, gpu: FakeGpu) -> None:
    """Replace functions that read a tensor's memory or move it to another device."""
    data: Any = torch._C.TensorBase.data

    def set_data(self: Tensor, value: Tensor) -> None:
        if isinstance(self, FakeTensor) == isinstance(value, FakeTensor):
            data.__set__(self, value)
        else:
            replace_memory(self, value)

    for owner in (torch.Tensor, torch.nn.Parameter):
        patch(owner, "data", property(data.__get__, set_data))
    patch(torch.Tensor, "_make_subclass", staticmethod(make_meta_subclass))
    patch(FakeTensor, "is_cuda", property(lambda self: self.device.type == "cuda"))
    patch(FakeTensor, "is_meta", property(lambda self: self.device.type == "meta"))
    # torch would read a list element by element; this reads it with one wait.
    patch(FakeTensor, "tolist", lambda self: self.cpu().tolist())
    patch(FakeTensor, "get_device", lambda self: self.device.index)
    patch(FakeTensor, "data_ptr", lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.itemsize)
    patch(torch.Tensor, "pin_memory", lambda self, device=None: gpu.pin(self.clone()))
    patch(torch.Tensor, "is_pinned", lambda self, device=None: gpu.is_pinned(self))
    patch(torch.Tensor, "record_stream", lambda self, stream: None)
    patch(torch.Tensor, "cuda", to_device)
    patch(torch.Tensor, "to", move_tensor)
    patch(torch, "tensor", make_tensor)
    patch(torch.nn.Module, "_apply", apply_to_module)


def make_meta_subclass(kind: Any, element: Tensor, requires_grad: bool = False, **options: Any) -> Any:
    """Create a FakeTensor that is on its device for Python and on `meta` for C++. Otherwise autograd would need the
    device's streams, and a torch without CUDA would crash."""
    if issubclass(kind, FakeTensor):
        options["dispatch_device"] = False
    return torch._C.TensorBase._make_subclass(kind, element, requires_grad, **options)


def add_device_index(argument: Any) -> Any:
    """Return a device with its index. Without an index, C++ would query the driver."""
    if isinstance(argument, str | torch.device) and str(argument) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return argument


def move_tensor(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    named = {name: add_device_index(value) for name, value in kwargs.items()}
    return torch._C.TensorBase.to(self, *map(add_device_index, args), **named)


def make_tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    return torch_tensor(data, device=add_device_index(device), **options)


torch_tensor = torch.tensor


def to_device(self: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    return self.to("cuda" if device is None else device, non_blocking=non_blocking)


def replace_memory(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor the memory of another device. References to the tensor stay valid."""
    other, notes = value.detach(), dict(tensor.__dict__)
    requires_grad = tensor.requires_grad
    kind = notes.pop("_host_class", type(tensor))
    tensor.grad = None
    torch._C._swap_tensor_impl(tensor, other)
    if isinstance(value, FakeTensor):
        tensor.__class__ = FakeTensor
        notes |= {**other.__dict__, "_host_class": kind, "_fake_notes": {*other.__dict__}}
        tensor_is_parameter = {"_is_param": True} if issubclass(kind, torch.nn.Parameter) else {}
        notes |= tensor_is_parameter
    else:
        tensor.__class__ = kind
        only_fake = notes.pop("_fake_notes", set()) | {"_is_param"}
        notes = {name: note for name, note in notes.items() if name not in only_fake}
    tensor.__dict__.clear()
    tensor.__dict__.update(notes)
    tensor.requires_grad_(requires_grad)


def apply_to_module(self: Any, fn: Any, recurse: bool = True) -> Any:
    """Module._apply for an `fn` that may move tensors to another device."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = fn(parameter)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self
