"""Layer names in the original code of the model authors. Tools other than diffusers use these names.

Each model family defines a table of these names for LoRA files in the layouts of kohya and ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = "{}"  # placeholder for a block number


@dataclass(frozen=True, slots=True)
class LoraLayerName:
    """A linear layer in diffusers and its counterpart in the original code.

    The counterpart is a layer, or a slice of a fused layer.
    """

    diffusers: str  # with BLOCK, such as `blocks.{}.attn1.to_q`
    original: str
    index: int = 0  # number of the slice; the rows of the original weight have `num_slices` equal slices
    num_slices: int = 1


def map_layers(block: str, original: str, layers: Mapping[str, str]) -> tuple[LoraLayerName, ...]:
    """Map the layers of a diffusers block to the layers of an original block.

    layers: {diffusers name: original name}.
    """
    return tuple(LoraLayerName(f"{block}.{name}", f"{original}.{other}") for name, other in layers.items())


def map_fused_layers(block: str, layers: Sequence[str], original: str) -> tuple[LoraLayerName, ...]:
    """Map several layers of a diffusers block to one fused layer of an original block.

    The fused layer has one slice for each diffusers layer, in the order of `layers`. All slices have the same size.
    """
    return tuple(LoraLayerName(f"{block}.{layer}", original, i, len(layers)) for i, layer in enumerate(layers))


@dataclass(frozen=True)
class LoraNameTable:
    """The layer names of a model family in diffusers and in the original code, with lookup in both directions."""

    names: tuple[LoraLayerName, ...]

    def find_original(self, module: str) -> tuple[str, LoraLayerName] | None:
        """Return (original layer name, table entry) for a diffusers layer, or None if it is not in the table."""
        return _find_layer(module, self._by_diffusers)

    def find_members(self, module: str) -> list[tuple[str, LoraLayerName]]:
        """Return [(diffusers layer name, table entry)] for an original or kohya layer name, in the order of its slices.

        The list is empty if the name is unknown.
        """
        table = self._by_original_flat if "." not in module else self._by_original
        return [match for pattern, name, other in table if (match := _match_layer(module, pattern, name, other))]

    def find_diffusers(self, flat: str) -> str | None:
        """Return the diffusers layer name for a kohya name, which has underscores instead of dots.

        Returns None if the name is unknown.
        """
        return next((m[0] for p, n, o in self._by_diffusers_flat if (m := _match_layer(flat, p, n, o))), None)

    @cached_property
    def _by_diffusers(self) -> list[tuple[re.Pattern[str], LoraLayerName, str]]:
        return [(_compile_pattern(name.diffusers), name, name.original) for name in self.names]

    @cached_property
    def _by_original(self) -> list[tuple[re.Pattern[str], LoraLayerName, str]]:
        return [(_compile_pattern(name.original), name, name.diffusers) for name in self.names]

    @cached_property
    def _by_original_flat(self) -> list[tuple[re.Pattern[str], LoraLayerName, str]]:
        return [(_compile_pattern(name.original.replace(".", "_")), name, name.diffusers) for name in self.names]

    @cached_property
    def _by_diffusers_flat(self) -> list[tuple[re.Pattern[str], LoraLayerName, str]]:
        return [(_compile_pattern(name.diffusers.replace(".", "_")), name, name.diffusers) for name in self.names]


@dataclass(frozen=True, slots=True)
class FamilyLoraNames:
    """The layer names and the key prefix that kohya and ComfyUI use in the LoRA files of a model family."""

    family: str
    table: LoraNameTable
    comfyui_prefix: str


def _compile_pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape(BLOCK), r"(\d+)"))


def _match_layer(
    module: str, pattern: re.Pattern[str], name: LoraLayerName, other: str
) -> tuple[str, LoraLayerName] | None:
    match = pattern.fullmatch(module)
    return None if match is None else (other.format(*match.groups()), name)


def _find_layer(
    module: str, table: Iterable[tuple[re.Pattern[str], LoraLayerName, str]]
) -> tuple[str, LoraLayerName] | None:
    return next(
        (match for pattern, name, other in table if (match := _match_layer(module, pattern, name, other))), None
    )
