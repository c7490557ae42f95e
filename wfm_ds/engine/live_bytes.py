"""Measure the current and peak memory of tensors while a block of code runs, on a CPU or on the meta device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveByteCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that counts the bytes of live tensors which operators create on one type of device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.current = self.peak = 0
        self.counted_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        input_ids = {storage_id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device:
                continue
            if storage_id(tensor) not in input_ids:
                self._add_storage(tensor.untyped_storage())
        return result

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.counted_storages:  # another view of a counted storage
            return
        self.counted_storages.add(key)
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._drop_storage, key, size)

    def _drop_storage(self, key: int, size: int) -> None:
        self.counted_storages.discard(key)
        self.current -= size


def storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def emulate_gpu_attention() -> Iterator[None]:
    """Replace torch's attention function by `gpu_attention` inside the context.

    Without this, attention on the meta device saves a matrix with an element for each pair of tokens.
    """
    original = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (gpu_attention if query.device.type == "meta" else original)(query, *args, **kwargs)

    functional.scaled_dot_product_attention = attention  # a torch mode would miss recomputation in the backward pass
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Meta-device attention that saves only inputs, output and one number per query for the backward pass."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    output: torch.Tensor
    if attn_mask is None:
        output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )
        return output
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    return output
