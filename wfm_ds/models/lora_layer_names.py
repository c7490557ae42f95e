"""Tables that map diffusers' layer names to the names in the model authors' code, which kohya and ComfyUI use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = "{}"  # placeholder for a block number


@dataclass(frozen=True, slots=True)
class LoraLayerName:
    """A linear layer in diffusers, and the corresponding layer, or slice of a fused layer, in the original code."""

    diffusers: str  # with BLOCK, such as `blocks.{}.attn1.to_q`
    original: str
    index: int = 0  # index of the slice, from 0
    slice_sizes: tuple[int, ...] = (1,)  # relative numbers of rows of all slices of the fused weight


def map_layers(block: str, original: str, layers: Mapping[str, str]) -> tuple[LoraLayerName, ...]:
    """Map the layers of a diffusers block to the layers of the original block.

    layers: {diffusers name: original name}.
    """
    return tuple(LoraLayerName(f"{block}.{name}", f"{original}.{other}") for name, other in layers.items())


def map_fused_layers(
    block: str, layers: Sequence[str], original: str, sizes: Sequence[int] = ()
) -> tuple[LoraLayerName, ...]:
    """Map several layers of a diffusers block to slices of one fused layer of the original block.

    The slices have the order of `layers`. sizes: relative numbers of rows of the slices (default: equal).
    """
    slice_sizes = tuple(sizes) or (1,) * len(layers)
    return tuple(LoraLayerName(f"{block}.{layer}", original, i, slice_sizes) for i, layer in enumerate(layers))


@dataclass(frozen=True)
class LoraNameTable:
    """The layer names of a model family in diffusers and in the original code."""

    names: tuple[LoraLayerName, ...]

    def find_original(self, module: str) -> tuple[str, LoraLayerName] | None:
        """Return (original layer name, table entry) for a diffusers layer, or None if the layer is not in the table."""
        matches = ((p.fullmatch(module), name) for p, name in self._by_diffusers)
        return next(((name.original.format(*match.groups()), name) for match, name in matches if match), None)

    def find_slice_sizes(self, module: str) -> tuple[int, ...]:
        """Return the relative numbers of rows of the slices of the original layer that contains a diffusers layer."""
        match = self.find_original(module)
        return (1,) if match is None else match[1].slice_sizes

    def find_members(self, module: str) -> list[str]:
        """Return the diffusers layers that form an original layer, in the order of its slices.

        Returns [] if `module` is not an original layer name.
        """
        return _find_layers(module, self._by_original)

    def find_flat_members(self, flat: str) -> list[str]:
        """Return the diffusers layers that form a kohya layer, or [] for an unknown name.

        A kohya name is a diffusers name or an original name with underscores instead of dots.
        """
        return _find_layers(flat, self._by_flat_diffusers)[:1] or _find_layers(flat, self._by_flat_original)

    @cached_property
    def _by_diffusers(self) -> PatternTable:
        return [(_compile_pattern(name.diffusers), name) for name in self.names]

    @cached_property
    def _by_original(self) -> PatternTable:
        return [(_compile_pattern(name.original), name) for name in self.names]

    @cached_property
    def _by_flat_diffusers(self) -> PatternTable:
        return [(_compile_pattern(name.diffusers.replace(".", "_")), name) for name in self.names]

    @cached_property
    def _by_flat_original(self) -> PatternTable:
        return [(_compile_pattern(name.original.replace(".", "_")), name) for name in self.names]


PatternTable = list[tuple[re.Pattern[str], LoraLayerName]]


def _compile_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape(BLOCK), r"(\d+)"))


def _find_layers(module: str, table: PatternTable) -> list[str]:
    matches = ((pattern.fullmatch(module), name) for pattern, name in table)
    return [name.diffusers.format(*match.groups()) for match, name in matches if match]
