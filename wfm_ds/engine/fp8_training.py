"""Full fine-tuning with float8 matrix products, using torchao or TransformerEngine.

Weights stay ordinary parameters and are cast in every forward pass, so DeepSpeed, the optimizer, checkpoints and
exports work unchanged. Scales are computed from the current values, so equal weights predict identical bits. torchao
uses one scale per row of weights and inputs, so a sample's prediction does not depend on its batch. For
TransformerEngine see transformer_engine_linear.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from wfm_ds.engine.base_precision import eligible_layers, require_layers
from wfm_ds.engine.fp8_linear import require_fp8
from wfm_ds.engine.optional_packages import require_package
from wfm_ds.engine.transformer_engine_linear import te_layer_factory
from wfm_ds.recipe.sections import Fp8Training

logger = logging.getLogger(__name__)


def train_in_float8(
    denoiser: nn.Module,
    block_classes: Sequence[type[nn.Module]],
    library: Fp8Training | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Replace the denoiser's `eligible_layers` by float8 layers of the library that share their parameters.

    Returns the number of replaced layers; 0 if `library` is None. On a CPU, torchao emulates the products, for tests.
    Raises RecipeError if the library cannot be imported, the GPU does not support float8, or no layer is eligible.
    """
    if library is None:
        return 0
    key = f"model.fp8_training: {library}"
    require_package(library, key)
    require_fp8(key, dtype, device)
    convert = torchao_layer_factory(device) if library == "torchao" else te_layer_factory(key, device)
    layers = eligible_layers(denoiser, block_classes)
    require_layers(layers, key, denoiser)
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, convert(layer))
    how = ", emulated: on a CPU this is for tests" if device.type == "cpu" else ""
    logger.info("%d linear layers train in float8 with %s%s", len(layers), library, how)
    return len(layers)


def torchao_layer_factory(device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a torch linear layer to a torchao layer that shares its parameters."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        emulate=device.type == "cpu",
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, and their number need not be a multiple of 16
    )
    return lambda layer: Float8Linear.from_float(layer, config=config)
