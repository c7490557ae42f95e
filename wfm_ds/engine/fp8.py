"""A frozen base in float8 e4m3 under trained adapters: half the bytes of bfloat16, and on a GPU faster products.

Every policy of a run (trained, old, reference) computes with this one base, so that two equal policies predict equal
bits and the ratios of a first update are exactly 1. A row of a weight and a row of an input has a scale of its own
(wfm_kernels.quantise_rows): what a sample becomes depends on no other sample of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wfm_ds.errors import RecipeError
from wfm_kernels import quantise_rows

E4M3 = torch.float8_e4m3fn
SIDES = 16  # torch._scaled_mm takes matrices whose sides are multiples of it
CAPABILITY = (8, 9)  # of the first GPUs with products in float8


class Fp8Linear(nn.Linear):
    """A linear layer whose frozen weight [N, K] is kept as e4m3 bytes and a float32 scale for each of its rows.

    y = (xq @ Wq^T) * scale(x) * scale(W)^T + bias, in the dtype of x [..., K]. The gradient of x is that of the layer
    with the dequantised weight in the dtype of the gradient; the weight gets none. On a CPU the products are emulated
    in float64, where sums of such products are exact.
    """

    weight_bytes: Tensor
    scale_bits: Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Stand for a layer that would compute in `dtype`: its weight, rounded to that first, whatever it is stored in,
        is quantised on the device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        values, scale = quantise_rows(layer.weight.detach().to(device, dtype))
        # As integers and outside of state dicts: whoever casts the module to bfloat16, saves it or cuts up its
        # parameters means weights in another form.
        self.register_buffer("weight_bytes", values.view(torch.uint8), persistent=False)
        self.register_buffer("scale_bits", scale.view(torch.int32), persistent=False)
        self.bias = layer.bias
        self.dtype = dtype

    @property
    def quantised(self) -> tuple[Tensor, Tensor]:
        """The values of the weight, e4m3 [N, K], and their scales, float32 [N, 1]. Views."""
        return self.weight_bytes.view(dtype=E4M3), self.scale_bits.view(dtype=torch.float32)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # peft asks for its device and dtype
        """The weight that the layer stands for, made anew, in the dtype of the model."""
        return dequantised(*self.quantised, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, *self.quantised, self.bias)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, scale)
        rows, row_scale = quantise_rows(x)
        return scaled_product(rows, row_scale, values, scale, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        values, scale = ctx.saved_tensors
        return gradient @ dequantised(values, scale, gradient.dtype), None, None, None


def dequantised(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values * scale, rounded once to `dtype`."""
    return (values.float() * scale).to(dtype)


def scaled_product(
    rows: Tensor, row_scale: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(rows * row_scale) @ (values * scale)^T + bias in `dtype`: rows e4m3 [..., K] with scales [..., 1], values e4m3
    [N, K] with scales [N, 1]."""
    if rows.device.type != "cpu":
        return torch._scaled_mm(
            rows.view(-1, rows.shape[-1]),
            values.t(),
            scale_a=row_scale.view(-1, 1),
            scale_b=scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=False,  # it would add up in 14 bits
        ).view(*rows.shape[:-1], len(values))
    product = rows.double() @ values.double().t() * row_scale * scale.squeeze(1)
    return (product if bias is None else product + bias).to(dtype)


def quantise_base(
    denoiser: nn.Module, block_classes: Sequence[type[nn.Module]], dtype: torch.dtype, device: torch.device
) -> int:
    """Replace the linear layers of a denoiser's blocks, one after the other, by Fp8Linear on the device; the number of
    weights that they hold.

    Before adapters are added and before anything is moved or cut up: no second copy of a weight is ever whole. Left as
    they are: embeddings and the last layer (outside blocks), modulation (its numbers scale whole blocks), what the
    family keeps in float32, and sides that are no multiple of 16. Raises RecipeError for a GPU without float8 and for
    a denoiser without such a layer.
    """
    require_fp8(dtype, device)
    count = 0
    for path, layer in _eligible(denoiser, tuple(block_classes)):
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, Fp8Linear(layer, dtype, device))
        count += layer.in_features * layer.out_features
    if not count:
        raise RecipeError(
            f"model.base_precision: fp8 finds no linear layer in the blocks of {type(denoiser).__name__} whose sides "
            f"are multiples of {SIDES}: remove the key"
        )
    return count


def require_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises RecipeError where a GPU cannot multiply in float8, or not into this dtype."""
    if device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise RecipeError(f"model.base_precision: fp8 needs a GPU of compute capability 8.9 or newer, {name} is older")
    if dtype != torch.bfloat16:
        raise RecipeError("model.base_precision: fp8 computes in bfloat16 on a GPU: set model.dtype: bfloat16")


def _eligible(denoiser: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Linear]]:
    """The paths of the layers to quantise, and they themselves."""
    kept = [getattr(part, "_keep_in_fp32_modules", None) or () for part in denoiser.modules()]
    in_float32 = {name for names in kept for name in names}
    found = []
    for block_path, block in denoiser.named_modules():
        if not isinstance(block, blocks):
            continue
        for path, layer in block.named_modules(prefix=block_path):
            inside = path.removeprefix(block_path).split(".")
            modulates = any("norm" in part or part in in_float32 for part in inside)
            fits = type(layer) is nn.Linear and not layer.in_features % SIDES and not layer.out_features % SIDES
            if fits and not modulates:
                found.append((path, layer))
    return found
