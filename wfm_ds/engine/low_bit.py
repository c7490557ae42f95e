"""Frozen layers that keep a weight in eight or four bits and compute with what it stands for, made anew for each use.

They take the memory, not the time: a product is that of the model's dtype, after the weight was restored. Inputs are
not rounded, so their error is smaller than that of float8, and any GPU will do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wfm_ds.engine.frozen import FrozenLinear
from wfm_ds.engine.packages import require_package

MOST = 127  # of int8, on both sides of 0
BLOCK = 64  # elements of a weight with one scale in NF4


class StoredLinear(FrozenLinear):
    """y = x W^T + bias with the restored weight, in the dtype of the model; so is the gradient of x. Neither keeps it:
    the backward pass restores it once more."""

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self.bias, self)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: StoredLinear) -> Tensor:
        ctx.layer = layer  # frozen: nothing of it is saved
        return functional.linear(x, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.weight, None, None


class Int8Linear(StoredLinear):
    """A weight [N, K] as integers from -127 to 127 and a float32 scale for each of its rows."""

    codes: Tensor
    scale_bits: Tensor

    def keep(self, weight: Tensor) -> None:
        scale = weight.float().abs().amax(1, keepdim=True) / MOST
        scale = torch.where(scale > 0, scale, 1.0)
        self.register_buffer("codes", (weight.float() / scale).round().to(torch.int8), persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.codes.float() * self.scale_bits.view(dtype=torch.float32)).to(self.dtype)


class Nf4Linear(StoredLinear):
    """A weight [N, K] in NF4 (QLoRA, arXiv 2305.14314) by bitsandbytes: four bits an element, and a float32 scale for
    each 64 that follow each other."""

    codes: Tensor
    scale_bits: Tensor

    def keep(self, weight: Tensor) -> None:
        operators = nf4_operators()
        codes, scale = operators.quantize_4bit(weight.contiguous(), BLOCK, "nf4", torch.uint8)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        # A block a row: the library's kernel for CPUs begins a block with each row.
        shape = (self.in_features * self.out_features // BLOCK, BLOCK)
        scale = self.scale_bits.view(dtype=torch.float32)
        restored: Tensor = nf4_operators().dequantize_4bit(self.codes, scale, BLOCK, "nf4", shape, self.dtype)
        return restored.view(self.out_features, self.in_features)


def nf4_operators() -> Any:
    """The library's operators. Raises RecipeError where it is not installed."""
    require_package("bitsandbytes", "base_precision: nf4")
    import bitsandbytes  # noqa: F401, registers them

    return torch.ops.bitsandbytes
