"""Frozen linear layers with an 8-bit or 4-bit weight, which is dequantised at each use, and their base class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.engine.optional_packages import require_package

INT8_MAX = 127  # int8 range is [-127, 127]
NF4_BLOCK = 64  # weight elements per scale in NF4


class FrozenLinear(nn.Linear):
    """A linear layer without a weight parameter. Subclasses define how the weight is stored and multiplied.

    Subclasses must store the weight in integer buffers outside state dicts, so that casting, saving or partitioning the
    module does not affect it.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Round the weight of `layer` to `dtype` (the dtype of the model) and store it on the device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.dtype = dtype
        self.store_weight(layer.weight.detach().to(device, dtype))

    def store_weight(self, weight: Tensor) -> None:
        """Set the buffers that store `weight` [outputs, inputs]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # peft reads its device and dtype
        """The weight [outputs, inputs] in the model's dtype. It is dequantised at each access."""
        raise NotImplementedError


class LowBitLinear(FrozenLinear):
    """A layer that dequantises its weight in each forward pass and again in the backward pass: it saves only memory."""

    codes: Tensor
    scale_bits: Tensor

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _RestoredMatmul.apply(input, self.bias, self)  # type: ignore[no-untyped-call]
        return product


class _RestoredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: LowBitLinear) -> Tensor:
        ctx.layer = layer  # frozen, so nothing needs to be saved
        return functional.linear(x, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.weight, None, None


class Int8Linear(LowBitLinear):
    """A linear layer that stores its weight as integers from -127 to 127 and one float32 scale per row."""

    def store_weight(self, weight: Tensor) -> None:
        scale = weight.float().abs().amax(1, keepdim=True) / INT8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        self.register_buffer("codes", (weight.float() / scale).round().to(torch.int8), persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.codes.float() * self.scale_bits.view(dtype=torch.float32)).to(self.dtype)


class Nf4Linear(LowBitLinear):
    """A linear layer that stores its weight in the format NF4 of QLoRA (arXiv 2305.14314).

    Each element has 4 bits, and each block of 64 elements has a float32 scale.
    """

    def store_weight(self, weight: Tensor) -> None:
        operators = load_nf4_operators()
        codes, scale = operators.quantize_4bit(weight.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        # One block per row, because the CPU kernel of the library starts a new block at each row.
        shape = (self.in_features * self.out_features // NF4_BLOCK, NF4_BLOCK)
        scale = self.scale_bits.view(dtype=torch.float32)
        restored: Tensor = load_nf4_operators().dequantize_4bit(self.codes, scale, NF4_BLOCK, "nf4", shape, self.dtype)
        return restored.view(self.out_features, self.in_features)


def load_nf4_operators() -> Any:
    require_package("bitsandbytes", "base_precision: nf4")
    import bitsandbytes  # noqa: F401, registers them

    return torch.ops.bitsandbytes
