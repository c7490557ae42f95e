"""Low-precision base weights for LoRA (QLoRA): frozen linear layers are replaced by low-precision layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from wfm_ds.engine.fp8_linear import Fp8Linear, Fp8TwiceLinear, require_fp8
from wfm_ds.engine.low_bit_linear import FrozenLinear, Int8Linear, Nf4Linear
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import BasePrecision

logger = logging.getLogger(__name__)

LAYER_CLASSES: dict[BasePrecision, type[FrozenLinear]] = {
    "fp8": Fp8Linear,
    "fp8_twice": Fp8TwiceLinear,
    "int8": Int8Linear,
    "nf4": Nf4Linear,
}
SIDE_MULTIPLE = 16  # torch._scaled_mm requires that both sides of a matrix are multiples of this number


def quantise_base(
    denoiser: nn.Module,
    block_classes: Sequence[type[nn.Module]],
    precision: BasePrecision | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Replace the denoiser's `eligible_layers` by frozen low-precision layers on the device.

    Returns the number of quantised weight elements, which is 0 if `precision` is None. Call it before adapters are
    added and before weights are moved or partitioned. Raises RecipeError if the device does not support the precision,
    or if no layer is eligible.
    """
    if precision is None:
        return 0
    in_float8 = issubclass(LAYER_CLASSES[precision], Fp8Linear)
    if in_float8:
        require_fp8(f"base_precision: {precision}", dtype, device)
    layers = eligible_layers(denoiser, block_classes)
    require_layers(layers, f"base_precision: {precision}")
    count = 0
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, LAYER_CLASSES[precision](layer, dtype, device))
        count += layer.in_features * layer.out_features
    if device.type != "meta":
        how = " (emulated on the CPU, for tests only)" if in_float8 and device.type == "cpu" else ""
        logger.info("%.1f million frozen weights in %s%s", count / 1e6, precision, how)
    return count


def require_layers(layers: Sequence[object], key: str) -> None:
    """Raise RecipeError if `layers` is empty. key: recipe key to name in the message."""
    if not layers:
        raise RecipeError(
            f"{key}: the denoiser's blocks have no linear layer with sides that are multiples of {SIDE_MULTIPLE}: "
            "remove the key"
        )


def eligible_layers(denoiser: nn.Module, block_classes: Sequence[type[nn.Module]]) -> list[tuple[str, nn.Linear]]:
    """Return (name, layer) of the linear layers in the denoiser's blocks that can be quantised.

    Omitted are modulation layers (their outputs scale whole blocks), layers that diffusers keeps in float32, and layers
    with an input or output size that is not a multiple of 16.
    """
    blocks = tuple(block_classes)
    float32_names = [getattr(part, "_keep_in_fp32_modules", None) or () for part in denoiser.modules()]
    in_float32 = {name for names in float32_names for name in names}
    eligible = []
    for block_path, block in denoiser.named_modules():
        if not isinstance(block, blocks):
            continue
        for path, layer in block.named_modules(prefix=block_path):
            inside = path.removeprefix(block_path).split(".")
            modulates = any("norm" in part or part in in_float32 for part in inside)
            sides = (layer.in_features, layer.out_features) if type(layer) is nn.Linear else (1,)
            if not modulates and all(side % SIDE_MULTIPLE == 0 for side in sides):
                eligible.append((path, layer))
    return eligible
