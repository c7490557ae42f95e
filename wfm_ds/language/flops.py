"""Floating-point operations of a language model's rows, from the shapes of its layers and of what the rows hold.

2 per multiply-add of linear layers and attention; pointwise work does not count. Attention is between the tokens of one
conversation, so it goes with the sum of their squared lengths, not with the row's; the head's goes with the labelled
tokens; the tower's with the patches. A gradient of a layer's input costs as much as its forward, and so does one of its
weights: both together are the 6 per weight and token of full training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from wfm_ds.engine.work import Work
from wfm_ds.language.rows import RowBatch

VISION, DECODER, HEAD = "model.visual.", "model.language_model.", "lm_head."
FIRST = ("q_proj", "k_proj", "v_proj")  # of a layer: nothing of it comes before them
# Of a block: nothing that its backward pass needs comes after them, so that checkpointing does not compute them again.
LAST = ("down_proj.weight", "linear_fc2.weight", "down_proj.lora_B.default.weight")
Place: TypeAlias = tuple[int, int, int]  # part of the model, number of the block in it, stage in the block


@dataclass(frozen=True, slots=True)
class RowSize:
    """Numbers that a row's work depends on."""

    segments: Sequence[int]  # tokens of each conversation
    num_labelled: int
    grids: Sequence[tuple[int, int, int]] = ()  # patches of each image or video in time, down, across

    @classmethod
    def of(cls, row: RowBatch) -> RowSize:
        """Measure a row that is on the host."""
        grids = [
            tuple(grid) for name, found in row.media.items() if name.endswith("grid_thw") for grid in found.tolist()
        ]
        return cls(row.segments, len(row.kept), grids)

    @property
    def num_tokens(self) -> int:
        return sum(self.segments)

    @property
    def num_patches(self) -> int:
        return sum(t * h * w for t, h, w in self.grids)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights that every item of one kind is multiplied with."""

    kind: str  # patch, merged, token or labelled: what it is applied to
    weights: int  # that one item meets
    trains: bool
    passes_on: bool  # something before it trains, so that its input has a gradient
    repeated: bool  # gradient checkpointing computes it again: it stands in a block with a backward pass


class RowWork:
    """Costs of rows; taken of a model that is whole, with its adapters and its flags of what trains."""

    def __init__(self, network: Any, *, checkpointing: bool) -> None:
        self._layers = list(layers_of(network))
        config = network.config
        text, vision = config.get_text_config(), config.vision_config
        self._merge = int(vision.spatial_merge_size)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._text_width = text.num_attention_heads * head_dim
        self._vision_width = int(vision.hidden_size)
        self._first = first_trained(network)
        self._num_layers, self._num_blocks = int(text.num_hidden_layers), int(vision.depth)
        self._full = set(getattr(vision, "fullatt_block_indexes", range(self._num_blocks)))
        side = getattr(vision, "window_size", 0) // int(vision.patch_size)
        self._window = side // self._merge * self._merge
        self._checkpointing = checkpointing
        self._noted = Work()

    def note(self, row: RowBatch) -> None:
        """Add a row that is trained on."""
        self._noted += self.of(RowSize.of(row))

    def take(self) -> Work:
        """The work of all rows since the last call."""
        noted, self._noted = self._noted, Work()
        return noted

    def of(self, row: RowSize) -> Work:
        """The forward of a row and its backward pass, with what checkpointing repeats."""
        patches = row.num_patches
        items = {
            "patch": patches,
            "merged": patches // self._merge**2,
            "token": row.num_tokens,
            "labelled": row.num_labelled,
        }
        needed = repeated = 0
        for layer in self._layers:
            forward = 2 * layer.weights * items[layer.kind]
            needed += forward * (1 + layer.trains + layer.passes_on)
            repeated += forward * (layer.repeated and self._checkpointing)
        for attention, learns in self._attentions(row):
            needed += attention * (3 if learns else 1)
            repeated += attention * (self._checkpointing and learns)
        return Work(needed, repeated)

    def _attentions(self, row: RowSize) -> Iterator[tuple[int, bool]]:
        """The forward of each attention, and whether gradients pass it."""
        squares = sum(length**2 for length in row.segments)
        for number in range(self._num_layers):
            yield 4 * self._text_width * squares, self._trains_before((3, number, 1))
        for number in range(self._num_blocks):
            pairs = sum(t * self._pairs(h, w, whole=number in self._full) for t, h, w in row.grids)
            yield 4 * self._vision_width * pairs, self._trains_before((0, number, 1))

    def _pairs(self, height: int, width: int, *, whole: bool) -> int:
        """Pairs of patches of a frame that see each other: all, or those of a window."""
        if whole or not self._window:
            return (height * width) ** 2
        return _squares(height, self._window) * _squares(width, self._window)

    def _trains_before(self, at: Place) -> bool:
        return self._first < at


def _squares(length: int, part: int) -> int:
    """The sum of the squares of the parts that a length is cut into."""
    return length // part * part**2 + (length % part) ** 2


def place(name: str) -> Place:
    """Return the place of a module or parameter in a forward: what is smaller is done before."""
    words = name.split(".")
    number = next((int(word) for word in words if word.isdigit()), 0)
    if name.startswith(VISION):
        if "merger" in name:
            stage = 0 if "norm" in name or "ln_q" in name else 1
            return (1, 0, 2 if "2" in words or "linear_fc2" in words else stage)
        if ".blocks." not in name:
            return (0, -1, 0)
        return (0, number, 0 if any(word in ("norm1", "qkv", "q", "k", "v") for word in words) else 1)
    if ".layers." in name:
        early = any(word in FIRST or word == "input_layernorm" for word in words)
        return (3, number, 0 if early else 1)
    return (2, 0, 0) if "embed_tokens" in name else (4, 0, 0)


def first_trained(network: nn.Module) -> Place:
    """Return the place at which gradients of a backward pass end."""
    return min(place(name) for name, parameter in network.named_parameters() if parameter.requires_grad)


def layers_of(network: nn.Module) -> Iterator[Layer]:
    """Find the layers of a model, adapters among them, experts at the share of them that a token meets."""
    config: Any = network.config
    text = config.get_text_config()
    first = first_trained(network)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        table = "embed" in name and "patch_embed" not in name  # looked up, not multiplied with
        if parameter.ndim < 2 or table:
            continue
        share = 1.0
        if ".experts." in name and parameter.ndim == 3:
            share = text.num_experts_per_tok / text.num_experts
        at = place(name)
        inside = ".lora_B." in name  # after its own lora_A
        in_block = ".blocks." in name or ".layers." in name
        yield Layer(
            kind=_kind(name),
            weights=round(parameter.numel() * share),
            trains=parameter.requires_grad,
            passes_on="patch_embed" not in name and ((inside and parameter.requires_grad) or first < at),
            repeated=in_block and not name.endswith(LAST) and first < (*at[:2], 2),
        )


def _kind(name: str) -> str:
    if name.startswith(VISION):
        return "merged" if "merger" in name else "patch"
    return "labelled" if name.startswith(HEAD) else "token"
