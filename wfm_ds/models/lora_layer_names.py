"""Layer names in the authors' original code, which tools other than diffusers use.

Each family defines its own table. Used for LoRA files in the layouts of kohya and ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = "{}"  # placeholder for a block number


@dataclass(frozen=True, slots=True)
class LoraLayerName:
    """One linear layer of diffusers and the rows of the original layer that it corresponds to."""

    diffusers: str  # with BLOCK, such as `blocks.{}.attn1.to_q`
    original: str
    index: int = 0  # slice number, of `num_slices` equal slices along the rows of the original weight
    num_slices: int = 1


def map_layers(block: str, original: str, layers: Mapping[str, str]) -> tuple[LoraLayerName, ...]:
    """Map layers of a diffusers block to the original names. layers: original name by diffusers name."""
    return tuple(LoraLayerName(f"{block}.{name}", f"{original}.{other}") for name, other in layers.items())


def map_fused_layers(block: str, layers: Sequence[str], original: str) -> tuple[LoraLayerName, ...]:
    """Map several diffusers layers to one fused layer of the original, in this order."""
    return tuple(LoraLayerName(f"{block}.{layer}", original, i, len(layers)) for i, layer in enumerate(layers))


@dataclass(frozen=True)
class LoraNameTable:
    """The layer names of a family, with lookup in both directions."""

    names: tuple[LoraLayerName, ...]

    def find_original(self, module: str) -> tuple[str, LoraLayerName] | None:
        """Return the original layer of a diffusers layer and its entry; None if the table lacks it."""
        return _find_layer(module, self._by_diffusers)

    def find_members(self, module: str) -> list[tuple[str, LoraLayerName]]:
        """Return the diffusers layers of an original layer, in order; [] if the table lacks it.

        Accepts names with underscores instead of dots, as kohya writes them.
        """
        table = self._by_original_flat if "." not in module else self._by_original
        return [match for pattern, name, other in table if (match := _match_layer(module, pattern, name, other))]

    def find_diffusers(self, flat: str) -> str | None:
        """Return the diffusers layer from its name with underscores for dots; None if the table lacks it."""
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
    """The naming of a LoRA's family in other tools."""

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
