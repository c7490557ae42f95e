"""Base class of frozen linear layers with a quantized weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FrozenLinear(nn.Linear):
    """A linear layer without a weight parameter. Subclasses define how the weight is stored and multiplied.

    Subclasses must store the weight in integer buffers outside state dicts, so that casting, saving or partitioning the
    module does not affect it.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Round the weight of `layer` to `dtype` (the dtype of the model) and store it on the device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.dtype = dtype
        self.store_weight(layer.weight.detach().to(device, dtype))

    def store_weight(self, weight: Tensor) -> None:
        """Set the buffers that store `weight` [outputs, inputs]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # peft reads its device and dtype
        """The weight [outputs, inputs] in the model's dtype. It is dequantised at each access."""
        raise NotImplementedError
