"""Full fine-tuning with products in float8, by torchao: weights stay plain parameters, cast anew in each forward.

So DeepSpeed, optimizer, policies, checkpoints and exports see what they see without it. Scales are a row's, of weights
and inputs alike, and taken from the numbers at hand, never from earlier steps: equal weights predict equal bits, and a
sample's prediction depends on no other sample of its batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import nn

from wfm_ds.engine.base_precision import eligible_layers, require_some
from wfm_ds.engine.fp8 import require_fp8
from wfm_ds.engine.packages import require_package

logger = logging.getLogger(__name__)

KEY = "model.fp8_training: torchao"


def train_in_float8(
    denoiser: nn.Module, block_classes: Sequence[type[nn.Module]], dtype: torch.dtype, device: torch.device
) -> int:
    """Replace the linear layers of a denoiser's blocks, those of `eligible_layers`, by torchao's, with the very same
    parameters. Returns their number. On a CPU products are emulated, for tests.

    Raises RecipeError where torchao is not installed, where a GPU cannot multiply in float8, and for a denoiser without
    such layers.
    """
    require_package("torchao", KEY)
    require_fp8(KEY, dtype, device)
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        emulate=device.type == "cpu",
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, whose number need not be a multiple of 16
    )
    layers = eligible_layers(denoiser, block_classes)
    require_some(layers, KEY, denoiser)
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, Float8Linear.from_float(layer, config=config))
    how = ", emulated: on a CPU this is for tests" if device.type == "cpu" else ""
    logger.info("%d linear layers train in float8%s", len(layers), how)
    return len(layers)
