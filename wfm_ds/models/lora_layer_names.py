"""Tables that map diffusers' layer names to the names in the model authors' code, which kohya and ComfyUI use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = "{}"  # placeholder for a block number
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION_LAYERS = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")  # of text tokens, in joint attention
JOINT_ATTENTION_LAYERS = (*ATTENTION_LAYERS, *TEXT_ATTENTION_LAYERS)


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
        matches = self._find_matches(module, "diffusers")
        return next(((name.original.format(*match.groups()), name) for match, name in matches), None)

    def find_slice_sizes(self, module: str) -> tuple[int, ...]:
        """Return the relative numbers of rows of the slices of the original layer that contains a diffusers layer."""
        match = self.find_original(module)
        return (1,) if match is None else match[1].slice_sizes

    def find_members(self, module: str) -> list[str]:
        """Return the diffusers layers that form an original layer, in the order of its slices.

        Returns [] if `module` is not an original layer name.
        """
        return self._find_layers(module, "original")

    def find_flat_members(self, flat: str) -> list[str]:
        """Return the diffusers layers that form a kohya layer, or [] for an unknown name.

        A kohya name is a diffusers name or an original name with underscores instead of dots.
        """
        return self._find_layers(flat, "flat diffusers")[:1] or self._find_layers(flat, "flat original")

    @cached_property
    def _patterns(self) -> dict[str, list[re.Pattern[str]]]:
        """{kind of name: the pattern of each entry of `names`}."""
        kinds = {
            "diffusers": [name.diffusers for name in self.names],
            "original": [name.original for name in self.names],
        }
        kinds |= {f"flat {kind}": [name.replace(".", "_") for name in names] for kind, names in kinds.items()}
        return {
            kind: [re.compile(re.escape(name).replace(re.escape(BLOCK), r"(\d+)")) for name in names]
            for kind, names in kinds.items()
        }

    def _find_matches(self, module: str, kind: str) -> list[tuple[re.Match[str], LoraLayerName]]:
        matches = (
            (pattern.fullmatch(module), name) for pattern, name in zip(self._patterns[kind], self.names, strict=True)
        )
        return [(match, name) for match, name in matches if match]

    def _find_layers(self, module: str, kind: str) -> list[str]:
        return [name.diffusers.format(*match.groups()) for match, name in self._find_matches(module, kind)]
