"""Select the layers of a denoiser that get LoRA adapters, and merge adapters into the weights of these layers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import LoraRecipe

BLOCK_NUMBER = "{}"
"""Placeholder in a target name that matches the number of any block, for example `blocks.{}.attn.to_k`."""


def match_linear_layers(network: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return the names of the linear layers that the LoRA targets select.

    As in PEFT, a target is the full name of a layer or the end of the name: `to_k` selects `attn.to_k`.
    """
    return [name for name, part in _match_modules(network, targets) if isinstance(part, nn.Linear)]


def peft_targets(network: nn.Module, targets: Sequence[str]) -> list[str]:
    """Convert LoRA targets to targets that PEFT accepts.

    A target with the placeholder BLOCK_NUMBER is replaced by the names of all modules that match the target.
    """
    names: list[str] = []
    for target in targets:
        names += [name for name, _ in _match_modules(network, [target])] if BLOCK_NUMBER in target else [target]
    return names


def check_lora_layers(network: nn.Module, lora: LoraRecipe, default_targets: Sequence[str]) -> None:
    """Raise RecipeError if a layer that the recipe's `lora` section selects cannot be trained or exported.

    Only linear layers can have adapters. A fully trained layer (lora.modules_to_save) must have parameters and must not
    contain other layers. default_targets: used if lora.target_modules is unset.
    """
    targets = lora.target_modules or default_targets
    if not hasattr(network, "add_adapter"):
        raise RecipeError(
            f"lora: {type(network).__name__} has no method add_adapter: derive it from diffusers' PeftAdapterMixin, or "
            "set lora: null"
        )
    if not match_linear_layers(network, targets):
        raise RecipeError(f"lora.target_modules: no linear layer of the denoiser ends with {', '.join(targets)}")
    for name, part in _match_modules(network, targets):
        if not isinstance(part, nn.Linear):
            raise RecipeError(
                f"lora.target_modules: {name} is of type {type(part).__name__}, but only linear layers can have an "
                "exported adapter: remove it, or train it in full with lora.modules_to_save"
            )
    for suffix in lora.modules_to_save:
        matches = list(_match_modules(network, [suffix]))
        if not any(True for _, part in matches for _ in part.parameters()):
            raise RecipeError(f"lora.modules_to_save: no layer with weights ends with {suffix}")
        for name, part in matches:
            inner = [child for child, layer in part.named_modules() if child and [*layer.parameters(recurse=False)]]
            if inner:
                names = ", ".join(f"{suffix}.{child}" for child in inner)
                raise RecipeError(f"lora.modules_to_save: {name} contains other layers; name these instead: {names}")


def find_adapter_layers(denoiser: nn.Module) -> list[Any]:
    return [part for part in denoiser.modules() if isinstance(part, BaseTunerLayer)]


def _match_modules(network: nn.Module, targets: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    names = "|".join(re.escape(target).replace(re.escape(BLOCK_NUMBER), r"\d+") for target in targets)
    pattern = re.compile(rf"(?:.*\.)?(?:{names})")
    return ((name, part) for name, part in network.named_modules() if pattern.fullmatch(name))


class AdapterMerge:
    """Merges a LoRA adapter into the weights of its layers, and restores these weights. Does not support ZeRO-3.

    layers: result of `find_adapter_layers`. While an adapter is merged, the caller must disable all adapters.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        # Copies, because PEFT's unmerge would leave rounding errors. Empty if no adapter is merged.
        self._original_weights: list[Tensor] = []

    @torch.no_grad()
    def merge(self, adapter: str) -> None:
        """Set each weight to the unmerged weight plus this adapter's LoRA update, computed in float32."""
        if not self._original_weights:
            self._original_weights = [layer.get_base_layer().weight.detach().clone() for layer in self._layers]
        for layer, original in zip(self._layers, self._original_weights, strict=True):
            merged = original.float() + layer.get_delta_weight(adapter).float()
            layer.get_base_layer().weight.copy_(merged)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the unmerged weights. Does nothing if no adapter is merged."""
        originals, self._original_weights = self._original_weights, []
        if originals:
            for layer, original in zip(self._layers, originals, strict=True):
                layer.get_base_layer().weight.copy_(original)


@contextlib.contextmanager
def use_merged_weights(layers: Sequence[Any], adapter: str) -> Iterator[None]:
    merge = AdapterMerge(layers)
    try:
        merge.merge(adapter)
        yield
    finally:
        merge.restore()
