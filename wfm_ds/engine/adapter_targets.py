"""Selection of the layers that get LoRA adapters, by the target names of a recipe or a model family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sections import LoraRecipe

BLOCK_NUMBER = "{}"
"""Placeholder for a block's number in a target name."""


def match_linear_layers(network: nn.Module, targets: Iterable[str]) -> list[str]:
    """Return the names of the linear layers that equal a target or end with a dot and a target (PEFT's rule)."""
    return [name for name, part in _match_modules(network, targets) if isinstance(part, nn.Linear)]


def peft_targets(network: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return targets that PEFT accepts: a target with BLOCK_NUMBER becomes the names of all modules that it matches."""
    names: list[str] = []
    for target in targets:
        names += [name for name, _ in _match_modules(network, [target])] if BLOCK_NUMBER in target else [target]
    return names


def check_lora_layers(network: nn.Module, lora: LoraRecipe, default_targets: Sequence[str]) -> None:
    """Raise RecipeError if the layers of a LoRA cannot be trained or exported.

    Adapters are for linear layers. A fully trained layer (lora.modules_to_save) has parameters but no inner modules.
    default_targets: targets of the model family, for an unset lora.target_modules.
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
                f"lora.target_modules: {name} is of type {type(part).__name__}, and an export has only adapters of "
                "linear layers: remove it, or train it in full with lora.modules_to_save"
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


def _match_modules(network: nn.Module, targets: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    names = "|".join(re.escape(target).replace(re.escape(BLOCK_NUMBER), r"\d+") for target in targets)
    pattern = re.compile(rf"(?:.*\.)?(?:{names})")
    return ((name, part) for name, part in network.named_modules() if pattern.fullmatch(name))
