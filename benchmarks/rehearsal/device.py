"""The fake device: tensors on `cuda` are FakeTensors without values; tensors on the host are real.

Values that the host reads from the device are made up (`scalar_answer`, `copy_answer`). Each read is recorded as an
event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.rehearsal.record import Record

aten = torch.ops.aten
# The host needs the value or shape of the result: each of these operators waits for the device.
READING = frozenset({"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim"})
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class ValuelessMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensors that are on `meta` for C++ (fake_machine.make_meta_subclass)."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.scalar_tensor.default and torch.device((kwargs or {}).get("device") or "cpu").type == "meta":
            # C++ made a tensor from a number to combine with another tensor: torch.where(condition, 0, other).
            kwargs = {**kwargs, "device": torch.device("cuda", torch.cuda.current_device())}
        return super().dispatch(func, types, args, kwargs)


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on host tensors normally, and operators on device tensors without values."""

    def __init__(self, record: Record, collective: Callable[..., Any]) -> None:
        """collective: runs an operator of torch.distributed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.fake = ValuelessMode(allow_non_fake_inputs=True)
        self.pinned: list[Tensor] = []  # referenced, so that no other tensor reuses their memory
        self._collective = collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return self._collective(func, args)
        pin = bool(kwargs.pop("pin_memory", False))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        to = kwargs.get("device")
        to = None if to is None else torch.device(to).type
        if to == "meta" and func is aten._to_copy.default and isinstance(args[0], FakeTensor):
            kwargs["device"], to = args[0].device, "cuda"  # C++ sees FakeTensors on meta
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if to != "cuda":
                result = func(*args, **kwargs)
                return self.pin(result) if pin else result
            if leaves:
                self.record_copy(func, leaves[0], to_device=True, non_blocking=bool(kwargs.get("non_blocking")))
            return self.run_fake(func, args, kwargs)
        return self.run_on_device(func, args, kwargs, leaves, to)

    def run_on_device(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor], to: str | None) -> Any:
        """Run an operator with at least one device tensor."""
        name = func._schema.name
        if func is aten._local_scalar_dense.default:
            self.record.add_event("sync", name)
            return scalar_answer(args[0].dtype)
        if name in READING:
            self.record.add_event("sync", name)
            return reading_answer(func, args, self.run_fake)
        if func is aten.copy_.default:
            return self.copy_into(func, args, kwargs)
        if to == "cpu":
            self.record_copy(func, leaves[0], to_device=False, non_blocking=bool(kwargs.get("non_blocking")))
            return self.read_back(self.run_fake(func, args, kwargs))
        if to == "meta":  # the shape of a device tensor, for counts without a device
            shape = self.run_fake(func, args, {**kwargs, "device": leaves[0].device})
            return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="meta")
        if name in INDEXING:
            for leaf in leaves:
                if leaf.device.type == "cpu" and leaf.ndim:
                    self.record_copy(func, leaf, to_device=True, non_blocking=False)
        return self.run_fake(func, args, kwargs)

    def copy_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if target.device.type == source.device.type:
            return self.run_fake(func, args, kwargs)
        if isinstance(target, FakeTensor):
            self.record_copy(func, source, to_device=True, non_blocking=non_blocking)
            return self.run_fake(func, args, kwargs)
        self.record_copy(func, source, to_device=False, non_blocking=non_blocking and self.is_pinned(target))
        return target.copy_(copy_answer(source).expand(target.shape))

    def run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without values. Host and device tensors cannot both be arguments, except where torch allows
        it (a scalar, an index): FakeTensor raises."""
        with self.fake:
            args, kwargs = tree_map(fake_copy, (args, kwargs))
            return func(*args, **kwargs)

    def read_back(self, found: Any) -> Any:
        """Replace tensors without values by host tensors with made-up values."""
        return tree_map(lambda leaf: copy_answer(leaf) if isinstance(leaf, FakeTensor) else leaf, found)

    def record_copy(self, func: Any, moved: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        """Record a copy. It is asynchronous if requested and if the host tensor is pinned. torch pins the result of a
        non-blocking copy to the host itself."""
        is_async = non_blocking and (not to_device or self.is_pinned(moved))
        direction = "host to device" if to_device else "device to host"
        self.record.add_event("copy", f"{func._schema.name} {direction}", blocking=not is_async, num_bytes=moved.nbytes)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor.detach())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        where = tensor.untyped_storage().data_ptr()
        return any(other.untyped_storage().data_ptr() == where for other in self.pinned)


def fake_copy(leaf: Any) -> Any:
    """Return a new FakeTensor for a host tensor, because torch's conversion keeps a reference to each tensor."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    device = "cuda" if leaf.device.type == "meta" else "cpu"  # C++ makes scratch tensors on meta
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


def scalar_answer(dtype: torch.dtype) -> float | int | bool:
    """Return a made-up number for the host: overflow flags (uint8, bool) are not set."""
    if dtype in (torch.bool, torch.uint8):
        return False if dtype == torch.bool else 0
    return 0.5 if dtype.is_floating_point else 1


def copy_answer(tensor: Tensor) -> Tensor:
    """Return a made-up tensor for the host: all flags are set (a sample is finite)."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.fill_(1 if tensor.dtype == torch.bool else scalar_answer(tensor.dtype))


def reading_answer(func: Any, args: Any, run: Callable[..., Any]) -> Any:
    """Return a made-up result for an operator with a value-dependent output shape: all elements are present."""
    name = func._schema.name
    if name == "aten::equal":
        return True
    if name == "aten::nonzero":
        x = args[0]
        return run(aten.zeros.default, ([x.numel(), x.ndim],), {"dtype": torch.int64, "device": x.device})
    if name == "aten::masked_select":
        return run(aten.reshape.default, (args[0].expand(args[1].shape), [-1]), {})
    raise NotImplementedError(f"{name} on the device: add it to benchmarks/rehearsal/device.py")
