"""Frozen float8 (e4m3) linear layers for LoRA. They need half the memory of bfloat16 and are faster on a GPU.

Each row of an input has its own scale, so a sample's prediction does not depend on the other samples in its batch.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wfm_ds.engine.low_bit_linear import FrozenLinear
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
    fast_accumulation = False  # set by `set_fast_accumulation`

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
        return self.multiply(input)

    def multiply(self, x: Tensor, *back: Tensor) -> Tensor:
        """Compute the layer's output. back: the transposed weight and its row scales, see _Fp8Matmul."""
        factors = *quantise_input(x), *self.quantised_weight
        product: Tensor = _Fp8Matmul.apply(x, *factors, self.bias, self.fast_accumulation, *back)  # type: ignore[no-untyped-call]
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
        return self.multiply(input, self.back_bytes.view(dtype=E4M3), self.back_scale_bits.view(dtype=torch.float32))


class QuantisedInput(NamedTuple):
    source: weakref.ref[Tensor]
    state: tuple[int, bool]  # version of the source, and whether a CUDA graph was being captured
    rows: tuple[Tensor, Tensor]


class LastInput:
    """The input that was quantised last. Layers with the same input, such as q, k and v, quantise it once."""

    def __init__(self) -> None:
        self.entry: QuantisedInput | None = None

    def clear(self, source: weakref.ref[Tensor]) -> None:
        """Release the rows of an input that no longer exists."""
        entry = self.entry
        if entry is not None and entry.source is source:
            self.entry = None


last_input = LastInput()


def quantise_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of a layer's input in e4m3 and their scales, as `quantise_rows`.

    If the previous call had the same unchanged tensor, its result is returned. Compiled code merges equal calls itself.
    """
    if torch.compiler.is_compiling() or x.is_inference():  # tensors of inference mode have no version
        return quantise_rows(x)
    # A captured graph must compute its own rows: those of an earlier call would not change in a replay.
    state = x._version, x.is_cuda and torch.cuda.is_current_stream_capturing()
    entry = last_input.entry
    if entry is not None and entry.source() is x and entry.state == state:
        return entry.rows
    rows = quantise_rows(x)
    last_input.entry = QuantisedInput(weakref.ref(x, last_input.clear), state, rows)
    return rows


def set_fast_accumulation(network: nn.Module, enabled: bool) -> None:
    """Set whether matrix products on a GPU add with 14 bits, which is faster on Hopper GPUs, or in float32.

    The additional error is small compared with the rounding to float8. Use it for rollouts without log-probabilities.
    """
    for part in network.modules():
        if isinstance(part, Fp8Linear):
            part.fast_accumulation = enabled


@contextlib.contextmanager
def use_fast_accumulation(network: nn.Module) -> Iterator[None]:
    set_fast_accumulation(network, True)
    try:
        yield
    finally:
        set_fast_accumulation(network, False)


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        row_scale: Tensor,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        fast: bool,
        back: Tensor | None = None,
        back_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer's output. rows, row_scale: the quantised input x. values, scale: the quantised weight.

        fast: see `set_fast_accumulation`.
        back, back_scale: the same for the transposed weight. If given, the backward pass computes the gradient of x in
        float8.
        """
        ctx.in_float8 = back is not None
        ctx.save_for_backward(*((values, scale) if back is None else (back, back_scale)))
        return fp8_matmul(rows, row_scale, values, scale, bias, x.dtype, fast=fast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, scale = ctx.saved_tensors
        if ctx.in_float8:
            rows, row_scale = quantise_rows(gradient.contiguous())
            x_gradient = fp8_matmul(rows, row_scale, values, scale, None, gradient.dtype)
        else:
            x_gradient = gradient @ dequantise(values, scale, gradient.dtype)
        return x_gradient, *[None] * 8


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scale).to(dtype)


def fp8_matmul(
    rows: Tensor,
    row_scale: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    """Return (rows * row_scale) @ (values * scale)^T + bias in `dtype`.

    rows: e4m3 [..., inputs]. row_scale: [..., 1]. values: e4m3 [outputs, inputs]. scale: [outputs, 1]. fast: whether to
    accumulate with 14 bits on a GPU.
    """
    if rows.device.type != "cpu":
        return torch._scaled_mm(
            rows.view(-1, rows.shape[-1]),
            values.t(),
            scale_a=row_scale.view(-1, 1),
            scale_b=scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
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
