"""Selection of the layers that get LoRA adapters, by the target names of a recipe or a model family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

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


def _match_modules(network: nn.Module, targets: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    names = "|".join(re.escape(target).replace(re.escape(BLOCK_NUMBER), r"\d+") for target in targets)
    pattern = re.compile(rf"(?:.*\.)?(?:{names})")
    return ((name, part) for name, part in network.named_modules() if pattern.fullmatch(name))
