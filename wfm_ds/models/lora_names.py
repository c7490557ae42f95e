"""Names of a denoiser's layers in its authors' own code, which tools other than diffusers know them by.

A family states its table; nothing here knows a family. Used for LoRA files in the layouts of kohya and ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = "{}"  # stands for the number of a block


@dataclass(frozen=True, slots=True)
class LoraName:
    """One linear layer of diffusers, and the rows of an original layer that it is."""

    diffusers: str  # with BLOCK, as `blocks.{}.attn1.to_q`
    original: str
    place: int = 0  # of `shares` equal ranges of rows of the original's weight
    shares: int = 1


def renamed(block: str, original: str, layers: Mapping[str, str]) -> tuple[LoraName, ...]:
    """Name the layers of a block: those of diffusers and what the original calls them."""
    return tuple(LoraName(f"{block}.{own}", f"{original}.{theirs}") for own, theirs in layers.items())


def fused(block: str, layers: Sequence[str], original: str) -> tuple[LoraName, ...]:
    """Name layers that are one layer in the original, one after the other."""
    return tuple(LoraName(f"{block}.{layer}", original, i, len(layers)) for i, layer in enumerate(layers))


@dataclass(frozen=True)
class NameTable:
    """The table of a family, read in both directions."""

    names: tuple[LoraName, ...]

    def original(self, module: str) -> tuple[str, LoraName] | None:
        """The original's layer that a layer of diffusers belongs to, and how. None: the table does not have it."""
        return _found(module, self._by_diffusers)

    def members(self, module: str) -> list[tuple[str, LoraName]]:
        """The layers of diffusers that an original layer is, in their places; [] if the table does not have it. Dots
        may have become underscores, as kohya writes them."""
        table = self._by_original_flat if "." not in module else self._by_original
        return [found for pattern, name, other in table if (found := _one(module, pattern, name, other))]

    def diffusers(self, flat: str) -> str | None:
        """The layer of diffusers whose dots have become underscores; None if the table does not have it."""
        return next((f[0] for p, n, o in self._by_diffusers_flat if (f := _one(flat, p, n, o))), None)

    @cached_property
    def _by_diffusers(self) -> list[tuple[re.Pattern[str], LoraName, str]]:
        return [(_pattern(name.diffusers), name, name.original) for name in self.names]

    @cached_property
    def _by_original(self) -> list[tuple[re.Pattern[str], LoraName, str]]:
        return [(_pattern(name.original), name, name.diffusers) for name in self.names]

    @cached_property
    def _by_original_flat(self) -> list[tuple[re.Pattern[str], LoraName, str]]:
        return [(_pattern(name.original.replace(".", "_")), name, name.diffusers) for name in self.names]

    @cached_property
    def _by_diffusers_flat(self) -> list[tuple[re.Pattern[str], LoraName, str]]:
        return [(_pattern(name.diffusers.replace(".", "_")), name, name.diffusers) for name in self.names]


@dataclass(frozen=True, slots=True)
class Names:
    """The family of a LoRA, as other tools know it."""

    family: str
    table: NameTable
    comfyui_prefix: str


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape(BLOCK), r"(\d+)"))


def _one(module: str, pattern: re.Pattern[str], name: LoraName, other: str) -> tuple[str, LoraName] | None:
    match = pattern.fullmatch(module)
    return None if match is None else (other.format(*match.groups()), name)


def _found(module: str, table: Iterable[tuple[re.Pattern[str], LoraName, str]]) -> tuple[str, LoraName] | None:
    return next((found for pattern, name, other in table if (found := _one(module, pattern, name, other))), None)
