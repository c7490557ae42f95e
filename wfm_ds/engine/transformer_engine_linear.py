"""TransformerEngine's linear layers with the parameters of torch layers. Only this module imports TransformerEngine.

TransformerEngine needs CUDA, so it is imported when the first layer is built. Scales are per tensor, from the current
values (Float8CurrentScaling). Equal weights predict identical bits for equal batches, but a sample's prediction depends
on its batch, so the recipe rejects these layers for algorithms that compare predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.errors import RecipeError

ROW_MULTIPLE = 16  # the number of rows must be a multiple of it; the gradient of a weight sums over rows


def te_layer_factory(key: str, device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that converts a torch linear layer to a TransformerEngine layer that shares its parameters.

    State dicts do not change. Inputs [..., in_features] may have any number of rows. Raises RecipeError, naming the
    recipe key, if the device is not a GPU or TransformerEngine cannot be imported.
    """
    if device.type != "cuda":
        raise RecipeError(f"{key} needs a GPU, but the device is {device.type}: torchao's products are emulated there")
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
