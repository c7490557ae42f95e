"""A linear layer that does not train, its weight kept in fewer bits: what every way of keeping it has in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FrozenLinear(nn.Linear):
    """A linear layer without a weight among its parameters: a subclass says what is kept of it, and computes with that.

    What is kept belongs in buffers of integers, outside of state dicts: whoever casts the module to bfloat16, saves it
    or cuts up its parameters means weights in another form.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Stand for a layer that would compute in `dtype`: its weight, rounded to that first, whatever it is stored in,
        is kept on the device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.dtype = dtype
        self.keep(layer.weight.detach().to(device, dtype))

    def keep(self, weight: Tensor) -> None:
        """Set the buffers that stand for a weight [N, K]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # peft asks for its device and dtype
        """The weight [N, K] that the layer stands for, made anew, in the dtype of the model."""
        raise NotImplementedError
