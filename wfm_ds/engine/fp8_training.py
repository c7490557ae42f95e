"""Full fine-tuning with float8 matrix products, using torchao or TransformerEngine.

With TransformerEngine, a sample's prediction depends on the other samples in its batch, so algorithms that compare
predictions cannot use it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.engine.base_precision import eligible_layers, require_layers
from wfm_ds.engine.fp8_linear import require_fp8
from wfm_ds.engine.optional_packages import require_package
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import Fp8Training

logger = logging.getLogger(__name__)
# TransformerEngine requires inputs with a multiple of this number of rows.
ROW_MULTIPLE = 16


def train_in_float8(
    denoiser: nn.Module,
    block_classes: Sequence[type[nn.Module]],
    library: Fp8Training | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Replace the denoiser's `eligible_layers` by float8 layers of `library`, which share the original parameters.

    Returns the number of replaced layers, which is 0 if `library` is None. On a CPU, torchao emulates the matrix
    products. Raises RecipeError if the library cannot be imported, the GPU does not support float8, or no layer is
    eligible.
    """
    if library is None:
        return 0
    key = f"model.fp8_training: {library}"
    require_package(library, key)
    require_fp8(key, dtype, device)
    convert = torchao_layer_factory(device) if library == "torchao" else te_layer_factory(key, device)
    layers = eligible_layers(denoiser, block_classes)
    require_layers(layers, key)
    for path, layer in layers:
        parent, _, name = path.rpartition(".")
        setattr(denoiser.get_submodule(parent), name, convert(layer))
    how = " (emulated on the CPU, for tests only)" if device.type == "cpu" else ""
    logger.info("%d linear layers train in float8 with %s%s", len(layers), library, how)
    return len(layers)


def torchao_layer_factory(device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a torch linear layer to a torchao layer that shares its parameters."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        emulate=device.type == "cpu",
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, which are not always a multiple of 16
    )
    return lambda layer: Float8Linear.from_float(layer, config=config)


def te_layer_factory(key: str, device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a torch linear layer to a TransformerEngine layer that shares its parameters.

    key: recipe key to name in messages. Raises RecipeError if the device is not a GPU or TransformerEngine cannot be
    imported.
    """
    if device.type != "cuda":
        raise RecipeError(f"{key} needs a GPU, but the device is {device.type}: use torchao, which emulates float8")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling
    except (ImportError, OSError) as error:
        raise RecipeError(f"{key}: the package transformer_engine cannot be imported: {error}") from error
    recipe = Float8CurrentScaling()

    class TeLinear(te.Linear):  # type: ignore[misc]
        # This scaling recipe has no history to save. The library's own methods would add `_extra_state` to state dicts,
        # which checkpoints and diffusers pipelines do not have.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = inp.reshape(-1, self.in_features)
            if missing := -len(rows) % ROW_MULTIPLE:
                rows = functional.pad(rows, (0, 0, 0, missing))  # zero rows change neither the scale nor the gradients
            with te.autocast(enabled=True, recipe=recipe):
                product: Tensor = super().forward(rows, *args, **kwargs)
            if missing:
                product = product[:-missing]
            return product.view(*inp.shape[:-1], self.out_features)

    def convert(layer: nn.Linear) -> nn.Module:
        converted: nn.Module = TeLinear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=layer.weight.dtype,
            device="meta",  # neither allocated nor initialised, because the next line replaces the parameters
        )
        converted.weight, converted.bias = layer.weight, layer.bias
        return converted.train(layer.training)

    return convert
