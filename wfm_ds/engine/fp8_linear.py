"""Frozen float8 (e4m3) linear layers for LoRA. They need half the memory of bfloat16 and are faster on a GPU.

Each row of an input has its own scale, so a sample's prediction does not depend on the other samples in its batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wfm_ds.engine.frozen_linear import FrozenLinear
from wfm_ds.errors import RecipeError
from wfm_kernels import quantise_rows

E4M3 = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)  # compute capability of the first GPUs with float8 matrix products


class Fp8Linear(FrozenLinear):
    """A linear layer with a frozen weight [outputs, inputs], stored as e4m3 bytes and one float32 scale per row.

    With quantised matrices xq and Wq, the output is (xq @ Wq^T) * scale(x) * scale(W)^T + bias, in the dtype of the
    input x. The gradient of x is computed with the dequantised weight. On a CPU, matrix products are emulated in
    float64.
    """

    weight_bytes: Tensor
    scale_bits: Tensor

    def store_weight(self, weight: Tensor) -> None:
        values, scale = quantise_rows(weight)
        self.register_buffer("weight_bytes", values.view(torch.uint8), persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)

    @property
    def quantised_weight(self) -> tuple[Tensor, Tensor]:
        """Views of the weight: e4m3 values [outputs, inputs] and float32 scales [outputs, 1]."""
        return self.weight_bytes.view(dtype=E4M3), self.scale_bits.view(dtype=torch.float32)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return dequantise(*self.quantised_weight, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Fp8Matmul.apply(input, *self.quantised_weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class Fp8TwiceLinear(Fp8Linear):
    """An Fp8Linear that also computes the gradient of its input in float8, from a transposed copy of the weight."""

    back_bytes: Tensor
    back_scale_bits: Tensor

    def store_weight(self, weight: Tensor) -> None:
        super().store_weight(weight)
        values, scale = quantise_rows(weight.t().contiguous())
        self.register_buffer("back_bytes", values.view(torch.uint8), persistent=False)
        self.register_buffer("back_scale_bits", scale.view(torch.int32), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        back = self.back_bytes.view(dtype=E4M3), self.back_scale_bits.view(dtype=torch.float32)
        product: Tensor = _Fp8Matmul.apply(input, *self.quantised_weight, self.bias, *back)  # type: ignore[no-untyped-call]
        return product


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        back: Tensor | None = None,
        back_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer's output. values, scale: the quantised weight and its row scales.

        back, back_scale: the same for the transposed weight. If given, the backward pass computes the gradient of x in
        float8.
        """
        ctx.in_float8 = back is not None
        ctx.save_for_backward(*((values, scale) if back is None else (back, back_scale)))
        rows, row_scale = quantise_rows(x)
        return fp8_matmul(rows, row_scale, values, scale, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, scale = ctx.saved_tensors
        if ctx.in_float8:
            rows, row_scale = quantise_rows(gradient.contiguous())
            x_gradient = fp8_matmul(rows, row_scale, values, scale, None, gradient.dtype)
        else:
            x_gradient = gradient @ dequantise(values, scale, gradient.dtype)
        return x_gradient, None, None, None, None, None


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scale).to(dtype)


def fp8_matmul(
    rows: Tensor, row_scale: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (rows * row_scale) @ (values * scale)^T + bias in `dtype`.

    rows: e4m3 [..., inputs]. row_scale: [..., 1]. values: e4m3 [outputs, inputs]. scale: [outputs, 1].
    """
    if rows.device.type != "cpu":
        return torch._scaled_mm(
            rows.view(-1, rows.shape[-1]),
            values.t(),
            scale_a=row_scale.view(-1, 1),
            scale_b=scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=False,  # fast accumulation has 14 bits only
        ).view(*rows.shape[:-1], len(values))
    product = rows.double() @ values.double().t() * row_scale * scale.squeeze(1)
    return (product if bias is None else product + bias).to(dtype)


def require_fp8(key: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RecipeError if the device cannot multiply in float8 with outputs in `dtype`. key: recipe key to name."""
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise RecipeError(f"{key} needs a GPU of compute capability 8.9 or newer; {name} is older")
    if dtype != torch.bfloat16:
        raise RecipeError(f"{key} computes in bfloat16 on a GPU: set model.dtype: bfloat16")
