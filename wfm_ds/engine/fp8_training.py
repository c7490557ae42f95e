"""Full fine-tuning with products in float8, by torchao or TransformerEngine: weights stay plain parameters, cast anew
in each forward.

So DeepSpeed, optimizer, policies, checkpoints and exports see what they see without it. Scales are taken from the
numbers at hand, never from earlier steps, so equal weights predict equal bits. torchao's are a row's, of weights and
inputs alike: a sample's prediction depends on no other sample of its batch. TransformerEngine's are in te_linear.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from wfm_ds.engine.base_precision import eligible_layers, require_some
from wfm_ds.engine.fp8 import require_fp8
from wfm_ds.engine.packages import require_package
from wfm_ds.engine.te_linear import te_linear
from wfm_ds.recipe.sections import Fp8Training

logger = logging.getLogger(__name__)


def train_in_float8(
    denoiser: nn.Module,
    block_classes: Sequence[type[nn.Module]],
    library: Fp8Training | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Replace the linear layers of a denoiser's blocks, those of `eligible_layers`, by the library's, with the very
    same parameters; None replaces none. Returns their number. On a CPU torchao's products are emulated, for tests.

    Raises RecipeError where the library is not installed or cannot be imported, where a GPU cannot multiply in float8,
    and for a denoiser without such layers.
    """
    if library is None:
        return 0
    key = f"model.fp8_training: {library}"
    require_package(library, key)
    require_fp8(key, dtype, device)
    of_library = torchao_linear(device) if library == "torchao" else te_linear(key, device)
    layers = eligible_layers(denoiser, block_classes)
    require_some(layers, key, denoiser)
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, of_library(layer))
    how = ", emulated: on a CPU this is for tests" if device.type == "cpu" else ""
    logger.info("%d linear layers train in float8 by %s%s", len(layers), library, how)
    return len(layers)


def torchao_linear(device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return what makes a layer of torchao of a torch one, with the very same parameters."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        emulate=device.type == "cpu",
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, whose number need not be a multiple of 16
    )
    return lambda layer: Float8Linear.from_float(layer, config=config)
