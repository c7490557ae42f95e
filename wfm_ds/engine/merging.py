"""A LoRA added into the weights of its layers for a while, so that forwards are those of a model without adapters.

Afterwards the weights are what they were, bit for bit: a copy of each adapted layer's weight lies aside meanwhile, on
the same device. PEFT's own way back subtracts what it added, which rounds. Merged weights are written where the weights
lie, so that whatever knows their address (a captured graph) finds them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class AdapterMerge:
    """The adapted layers of a denoiser (flops.adapted_layers), and their own weights while one is in them. The layers
    are whole: not for ZeRO-3. Which adapter computes besides is the caller's matter: none should."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._kept: list[Tensor] = []  # empty: the layers have their own weights

    @torch.no_grad()
    def put_in(self, adapter: str) -> None:
        """Add this adapter into the layers' own weights, in place of one that is in them. Added up in float32 and
        rounded once."""
        if not self._kept:
            self._kept = [layer.get_base_layer().weight.detach().clone() for layer in self._layers]
        for layer, own in zip(self._layers, self._kept, strict=True):
            merged = own.float() + layer.get_delta_weight(adapter).float()
            layer.get_base_layer().weight.copy_(merged)

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the layers their own weights back, if an adapter is in them, and free the copies."""
        kept, self._kept = self._kept, []
        if kept:
            for layer, own in zip(self._layers, kept, strict=True):
                layer.get_base_layer().weight.copy_(own)


@contextlib.contextmanager
def merged(layers: Sequence[Any], adapter: str) -> Iterator[None]:
    """Have this adapter in the weights of its layers inside."""
    merge = AdapterMerge(layers)
    try:
        merge.put_in(adapter)
        yield
    finally:
        merge.take_out()
