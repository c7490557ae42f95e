"""Dropout of the trained LoRA adapter: active only in forward passes with gradients, reproducible after a resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from wfm_ds.engine.flops import find_adapter_layers
from wfm_ds.seeds import derive_seed


class AdapterDropout:
    """The dropout layers of the adapter `default`.

    Masks are seeded by run seed, rank, optimizer step and forward pass within the step, so checkpoints store no random
    state. Blocks recomputed in the backward pass use the same masks, because torch's checkpointing restores the random
    state.
    """

    def __init__(self, denoiser: nn.Module, seed: int, rank: int) -> None:
        """Disable dropout in all adapters (PEFT creates them in train mode). `seed_masks` enables only `default`."""
        layers = [dict(layer.lora_dropout) for layer in find_adapter_layers(denoiser)]
        for dropout in (dropout for by_adapter in layers for dropout in by_adapter.values()):
            dropout.training = False
        trained = (by_adapter.get("default") for by_adapter in layers)
        self._layers: list[Any] = [layer for layer in trained if isinstance(layer, nn.Dropout)]
        self._seed, self._rank = seed, rank
        self._step, self._num_forwards = -1, 0

    @contextlib.contextmanager
    def seed_masks(self, step: int, device: torch.device) -> Iterator[None]:
        """Enable dropout for one forward pass, unless gradients are disabled. step: optimizer steps, skipped or not."""
        with_gradient = torch.is_grad_enabled()
        for layer in self._layers:
            layer.training = with_gradient
        if not with_gradient:
            yield
            return
        self._num_forwards = self._num_forwards + 1 if step == self._step else 0
        self._step = step
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, "lora_dropout", step, self._num_forwards, self._rank))
            yield
