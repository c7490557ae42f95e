"""The base of a LoRA run in fewer bits: which of a denoiser's layers are kept so, and in what.

The one place that knows the values of the recipe's base_precision; each has a class of layers (fp8.py, low_bit.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from wfm_ds.engine.fp8 import Fp8Linear, Fp8TwiceLinear, require_fp8
from wfm_ds.engine.frozen import FrozenLinear
from wfm_ds.engine.low_bit import Int8Linear, Nf4Linear
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import BasePrecision

logger = logging.getLogger(__name__)

LAYERS: dict[BasePrecision, type[FrozenLinear]] = {
    "fp8": Fp8Linear,
    "fp8_twice": Fp8TwiceLinear,
    "int8": Int8Linear,
    "nf4": Nf4Linear,
}
SIDES = 16  # torch._scaled_mm takes matrices whose sides are multiples of it


def quantise_base(
    denoiser: nn.Module,
    block_classes: Sequence[type[nn.Module]],
    precision: BasePrecision | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Replace the linear layers of a denoiser's blocks, one after the other, by frozen ones of this precision on the
    device; None replaces none. Returns the number of weights that they hold.

    Before adapters are added and before anything is moved or cut up: no second copy of a weight is ever whole. Left as
    they are: embeddings and the last layer (outside blocks), modulation (its numbers scale whole blocks), what the
    family keeps in float32, and sides that are no multiple of 16. Raises RecipeError for a precision that the device
    does not have and for a denoiser without such a layer.
    """
    if precision is None:
        return 0
    in_float8 = issubclass(LAYERS[precision], Fp8Linear)
    if in_float8:
        require_fp8(f"base_precision: {precision}", dtype, device)
    layers = eligible_layers(denoiser, block_classes)
    require_some(layers, f"base_precision: {precision}", denoiser)
    count = 0
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, LAYERS[precision](layer, dtype, device))
        count += layer.in_features * layer.out_features
    if device.type != "meta":
        how = ", emulated: on a CPU this is for tests" if in_float8 and device.type == "cpu" else ""
        logger.info("%.1f million frozen weights in %s%s", count / 1e6, precision, how)
    return count


def require_some(layers: Sequence[object], key: str, denoiser: nn.Module) -> None:
    """Raises RecipeError, naming the key that asks, unless there are layers."""
    if not layers:
        raise RecipeError(
            f"{key} finds no linear layer in the blocks of {type(denoiser).__name__} whose sides are multiples of "
            f"{SIDES}: remove the key"
        )


def eligible_layers(denoiser: nn.Module, block_classes: Sequence[type[nn.Module]]) -> list[tuple[str, nn.Linear]]:
    """The layers to quantise, with their paths: the linear ones of blocks but modulation, what the family keeps in
    float32, and sides that are no multiple of 16."""
    blocks = tuple(block_classes)
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
