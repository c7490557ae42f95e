"""The device: tensors on `cuda` are FakeTensors, which have no values; tensors on the host are real.

What the host reads from the device is made up (`answer`), and each reading is an event of the record.
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
# Operators whose result's shape or value the host needs: each waits for the device.
READING = frozenset({"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim"})
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class Valueless(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensors whose C++ believes that they are on `meta` (ground.on_meta_below)."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.scalar_tensor.default and torch.device((kwargs or {}).get("device") or "cpu").type == "meta":
            # C++ made a tensor of a number, to go with another one: torch.where(condition, 0, other).
            kwargs = {**kwargs, "device": torch.device("cuda", torch.cuda.current_device())}
        return super().dispatch(func, types, args, kwargs)


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on host tensors for real, and those on device tensors without values."""

    def __init__(self, record: Record, collective: Callable[..., Any]) -> None:
        """collective: runs an operator of torch.distributed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.fake = Valueless(allow_non_fake_inputs=True)
        self.pinned: list[Tensor] = []  # kept, so that no other tensor gets their memory
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
            kwargs["device"], to = args[0].device, "cuda"  # C++ takes the device of FakeTensors for meta
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if to != "cuda":
                result = func(*args, **kwargs)
                return self.pin(result) if pin else result
            if leaves:
                self.note_copy(func, leaves[0], to_device=True, non_blocking=bool(kwargs.get("non_blocking")))
            return self.run(func, args, kwargs)
        return self.on_device(func, args, kwargs, leaves, to)

    def on_device(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor], to: str | None) -> Any:
        """Run an operator with at least one device tensor."""
        name = func._schema.name
        if func is aten._local_scalar_dense.default:
            self.record.note("sync", name)
            return scalar_answer(args[0].dtype)
        if name in READING:
            self.record.note("sync", name)
            return reading_answer(func, args, self.run)
        if func is aten.copy_.default:
            return self.copy_into(func, args, kwargs)
        if to == "cpu":
            self.note_copy(func, leaves[0], to_device=False, non_blocking=bool(kwargs.get("non_blocking")))
            return self.read(self.run(func, args, kwargs))
        if to == "meta":  # a shape of a device tensor, for who counts without a device
            shape = self.run(func, args, {**kwargs, "device": leaves[0].device})
            return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="meta")
        if name in INDEXING:
            for leaf in leaves:
                if leaf.device.type == "cpu" and leaf.ndim:
                    self.note_copy(func, leaf, to_device=True, non_blocking=False)
        return self.run(func, args, kwargs)

    def copy_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if target.device.type == source.device.type:
            return self.run(func, args, kwargs)
        if isinstance(target, FakeTensor):
            self.note_copy(func, source, to_device=True, non_blocking=non_blocking)
            return self.run(func, args, kwargs)
        self.note_copy(func, source, to_device=False, non_blocking=non_blocking and self.is_pinned(target))
        return target.copy_(copy_answer(source).expand(target.shape))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without values. A host tensor and one on the device cannot both be its arguments, but where
        torch allows it (a single number, an index): FakeTensor raises."""
        with self.fake:
            args, kwargs = tree_map(valueless, (args, kwargs))
            return func(*args, **kwargs)

    def read(self, found: Any) -> Any:
        """Host tensors with made-up values in place of valueless ones."""
        return tree_map(lambda leaf: copy_answer(leaf) if isinstance(leaf, FakeTensor) else leaf, found)

    def note_copy(self, func: Any, moved: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        """A copy goes on beside the host if it was asked to, and if the host's side is pinned. torch pins what a
        non-blocking copy to the host makes itself."""
        beside = non_blocking and (not to_device or self.is_pinned(moved))
        direction = "host to device" if to_device else "device to host"
        self.record.note("copy", f"{func._schema.name} {direction}", blocking=not beside, num_bytes=moved.nbytes)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor.detach())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        where = tensor.untyped_storage().data_ptr()
        return any(other.untyped_storage().data_ptr() == where for other in self.pinned)


def valueless(leaf: Any) -> Any:
    """The FakeTensor of a host tensor, made anew: torch's own conversion remembers each tensor that it saw."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    device = "cuda" if leaf.device.type == "meta" else "cpu"  # C++ makes scratch tensors where it thinks the others are
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


def scalar_answer(dtype: torch.dtype) -> float | int | bool:
    """Return what the host reads as one number: no overflow flag (uint8, bool) is up."""
    if dtype in (torch.bool, torch.uint8):
        return False if dtype == torch.bool else 0
    return 0.5 if dtype.is_floating_point else 1


def copy_answer(tensor: Tensor) -> Tensor:
    """Return what the host reads as a tensor: of flags all are up (a sample is finite)."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.fill_(1 if tensor.dtype == torch.bool else scalar_answer(tensor.dtype))


def reading_answer(func: Any, args: Any, run: Callable[..., Any]) -> Any:
    """The result of an operator whose shape follows from values: as if all elements were there."""
    name = func._schema.name
    if name == "aten::equal":
        return True
    if name == "aten::nonzero":
        x = args[0]
        return run(aten.zeros.default, ([x.numel(), x.ndim],), {"dtype": torch.int64, "device": x.device})
    if name == "aten::masked_select":
        return run(aten.reshape.default, (args[0].expand(args[1].shape), [-1]), {})
    raise NotImplementedError(f"{name} on the device: give it an answer in benchmarks/rehearsal/device.py")
