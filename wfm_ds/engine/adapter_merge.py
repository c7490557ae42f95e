"""Temporary merging of a LoRA into the weights of its layers, so that forward passes run without adapters.

The weights are restored bit for bit from copies on the same device; PEFT's unmerge would subtract the update and round.
Weights are changed in place, so captured CUDA graphs stay valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class AdapterMerge:
    """Merges a LoRA adapter into the weights of its layers, and restores these weights.

    layers: the adapted layers of a denoiser (flops.find_adapter_layers), not partitioned (no ZeRO-3). The caller must
    disable all adapters while one is merged.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._original_weights: list[Tensor] = []  # empty if no adapter is merged

    @torch.no_grad()
    def merge(self, adapter: str) -> None:
        """Set each weight to its unmerged value plus this adapter's LoRA update, summed in float32 and rounded once."""
        if not self._original_weights:
            self._original_weights = [layer.get_base_layer().weight.detach().clone() for layer in self._layers]
        for layer, original in zip(self._layers, self._original_weights, strict=True):
            merged = original.float() + layer.get_delta_weight(adapter).float()
            layer.get_base_layer().weight.copy_(merged)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the unmerged weights and free their copies. Does nothing if no adapter is merged."""
        originals, self._original_weights = self._original_weights, []
        if originals:
            for layer, original in zip(self._layers, originals, strict=True):
                layer.get_base_layer().weight.copy_(original)


@contextlib.contextmanager
def use_merged_weights(layers: Sequence[Any], adapter: str) -> Iterator[None]:
    """Merge `adapter` into the weights of these layers inside the context."""
    merge = AdapterMerge(layers)
    try:
        merge.merge(adapter)
        yield
    finally:
        merge.restore()
