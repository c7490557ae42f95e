"""Linear layers of TransformerEngine around the parameters of torch's: the only module that imports the package.

It cannot be imported without CUDA, so it is imported when a layer is asked for. Scales are a tensor's, taken from the
numbers at hand (Float8CurrentScaling): equal weights predict equal bits for equal batches, but a sample's prediction
depends on the others of its batch, and the recipe keeps such layers away from algorithms that compare predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.errors import RecipeError

ROWS = 16  # products take a multiple of it, and the gradient of a weight sums over rows


def te_linear(key: str, device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    """Return what makes a layer of TransformerEngine of a torch one: with the very same parameters, the same names in
    state dicts and none beside them, for inputs [..., in_features] of any number of rows.

    Raises RecipeError, naming the key that asks, on another device than a GPU and where the package cannot be imported.
    """
    if device.type != "cuda":
        raise RecipeError(f"{key} needs a GPU, and this is {device.type}: torchao's products are emulated there")
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling
    except (ImportError, OSError) as error:
        raise RecipeError(f"{key}: the package transformer_engine cannot be imported here: {error}") from error
    recipe = Float8CurrentScaling()

    class TeLinear(te.Linear):  # type: ignore[misc]
        # A recipe without a history has nothing to keep. The library's own would add `_extra_state` to state dicts,
        # which no checkpoint and no plain pipeline knows.
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = inp.reshape(-1, self.in_features)
            if missing := -len(rows) % ROWS:
                rows = functional.pad(rows, (0, 0, 0, missing))  # zeros change neither the scale nor a gradient
            with te.autocast(enabled=True, recipe=recipe):
                product: Tensor = super().forward(rows, *args, **kwargs)
            if missing:
                product = product[:-missing]
            return product.view(*inp.shape[:-1], self.out_features)

    def around(layer: nn.Linear) -> nn.Module:
        made: nn.Module = TeLinear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=layer.weight.dtype,
            device="meta",  # neither allocated nor drawn: the next line replaces them
        )
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    return around
