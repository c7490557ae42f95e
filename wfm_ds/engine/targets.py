"""The layers that adapters are put on, by the names that a recipe or a family gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

BLOCK = "{}"
"""Stands in a target for the number of a block."""


def adapted_names(network: nn.Module, targets: Iterable[str]) -> list[str]:
    """The linear layers whose names end with a target, as PEFT matches them: whole names between dots."""
    return [name for name, part in _named(network, targets) if isinstance(part, nn.Linear)]


def for_peft(network: nn.Module, targets: Sequence[str]) -> list[str]:
    """The targets as PEFT takes them: in place of each with BLOCK the names of its layers, which may be none."""
    found: list[str] = []
    for target in targets:
        found += [name for name, _ in _named(network, [target])] if BLOCK in target else [target]
    return found


def _named(network: nn.Module, targets: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    names = "|".join(re.escape(target).replace(re.escape(BLOCK), r"\d+") for target in targets)
    pattern = re.compile(rf"(?:.*\.)?(?:{names})")
    return ((name, part) for name, part in network.named_modules() if pattern.fullmatch(name))
