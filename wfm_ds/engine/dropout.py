"""Dropout of the trained adapter: in forwards with gradient alone, and the same in a run that was resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from wfm_ds.engine.flops import adapted_layers
from wfm_ds.seeds import derive_seed


class AdapterDropout:
    """The dropout layers of the adapter `default`.

    Their masks follow from the run's seed, the rank, the optimizer step and the place of the forward in it: nothing of
    them has to be kept in a checkpoint. Blocks that are computed again in the backward pass drop the same, because
    torch's checkpointing puts the generators back.
    """

    def __init__(self, denoiser: nn.Module, seed: int, rank: int) -> None:
        """Switch all dropout off, that of other policies for good: PEFT makes it in train mode."""
        layers = [dict(layer.lora_dropout) for layer in adapted_layers(denoiser)]
        for dropout in (dropout for by_adapter in layers for dropout in by_adapter.values()):
            dropout.training = False
        found = (by_adapter.get("default") for by_adapter in layers)
        self._layers: list[Any] = [layer for layer in found if isinstance(layer, nn.Dropout)]
        self._seed, self._rank = seed, rank
        self._step, self._forwards = -1, 0

    @contextlib.contextmanager
    def drawn(self, step: int, device: torch.device) -> Iterator[None]:
        """Have the forward inside drop if it has a gradient. step: optimizer steps before it, skipped ones too."""
        differentiated = torch.is_grad_enabled()
        for layer in self._layers:
            layer.training = differentiated
        if not differentiated:
            yield
            return
        self._forwards = self._forwards + 1 if step == self._step else 0
        self._step = step
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, "lora_dropout", step, self._forwards, self._rank))
            yield
