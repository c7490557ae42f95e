"""Temporary merging of a LoRA into the weights of its layers, so that forward passes run without adapters.

Afterwards the weights are restored bit for bit from copies on the same device. PEFT's unmerge subtracts the update
instead, which rounds. Merged weights are written in place, so a captured CUDA graph, which uses their addresses, stays
valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class AdapterMerge:
    """The adapted layers of a denoiser (flops.find_adapter_layers) and, while an adapter is merged, their original
    weights.

    The layers must not be partitioned: not for ZeRO-3. The caller must disable all adapters meanwhile.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._original_weights: list[Tensor] = []  # empty if no adapter is merged

    @torch.no_grad()
    def merge(self, adapter: str) -> None:
        """Merge this adapter into the original weights. Replaces an adapter that was merged before.

        The sum is computed in float32 and rounded once.
        """
        if not self._original_weights:
            self._original_weights = [layer.get_base_layer().weight.detach().clone() for layer in self._layers]
        for layer, original in zip(self._layers, self._original_weights, strict=True):
            merged = original.float() + layer.get_delta_weight(adapter).float()
            layer.get_base_layer().weight.copy_(merged)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the original weights if an adapter is merged, and free the copies."""
        originals, self._original_weights = self._original_weights, []
        if originals:
            for layer, original in zip(self._layers, originals, strict=True):
                layer.get_base_layer().weight.copy_(original)


@contextlib.contextmanager
def use_merged_weights(layers: Sequence[Any], adapter: str) -> Iterator[None]:
    """Merge this adapter into the weights of its layers inside the context."""
    merge = AdapterMerge(layers)
    try:
        merge.merge(adapter)
        yield
    finally:
        merge.restore()
