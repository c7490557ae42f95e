"""Floating-point operations of a vision-language model for packed sequences, from layer shapes and sequence contents.

Linear layers and attention count 2 per multiply-add; pointwise operations are ignored. Attention is limited to each
conversation, so it scales with the sum of their squared lengths. The head scales with the labelled tokens and the
vision tower with the patches. The gradients of a layer's input and of its weights each cost the same as its forward
pass, which gives the usual 6 per weight and token for full training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from wfm_ds.engine.work import Work
from wfm_ds.language.rows import RowBatch

VISION, DECODER, HEAD = "model.visual.", "model.language_model.", "lm_head."
FIRST = ("q_proj", "k_proj", "v_proj")  # first linear layers of a block
# Last linear layers of a block. The backward pass does not need their output, so checkpointing does not recompute them.
LAST = ("down_proj.weight", "linear_fc2.weight", "down_proj.lora_B.default.weight")
Place: TypeAlias = tuple[int, int, int]  # part of the model, block in it, stage within the block


@dataclass(frozen=True, slots=True)
class RowSize:
    """Sizes of a packed sequence that determine its FLOPs."""

    segments: Sequence[int]  # number of tokens of each conversation
    num_labelled: int
    grids: Sequence[tuple[int, int, int]] = ()  # patches of each image or video: time, height, width

    @classmethod
    def of(cls, row: RowBatch) -> RowSize:
        """Return the sizes of a packed sequence on the host."""
        grids = [
            tuple(grid)
            for name, grid_tensor in row.media.items()
            if name.endswith("grid_thw")
            for grid in grid_tensor.tolist()
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
    """Weights of a linear layer that multiply every item of one kind."""

    kind: str  # items it is applied to: patch, merged, token or labelled
    weights: int  # number of weights per item
    trains: bool
    passes_on: bool  # an earlier parameter is trained, so its input has a gradient
    repeated: bool  # recomputed by gradient checkpointing


class RowWork:
    """FLOPs of packed sequences, from an unsharded model with its adapters and requires_grad flags."""

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
        """Add the work of a training sequence."""
        self._noted += self.of(RowSize.of(row))

    def take(self) -> Work:
        """Return the work of all sequences since the last call, and reset it."""
        work, self._noted = self._noted, Work()
        return work

    def of(self, row: RowSize) -> Work:
        """Return the work of forward and backward pass, and the recomputation of checkpointing."""
        patches = row.num_patches
        items = {
            "patch": patches,
            "merged": patches // self._merge**2,
            "token": row.num_tokens,
            "labelled": row.num_labelled,
        }
        required = recomputed = 0
        for layer in self._layers:
            forward = 2 * layer.weights * items[layer.kind]
            required += forward * (1 + layer.trains + layer.passes_on)
            recomputed += forward * (layer.repeated and self._checkpointing)
        for attention, has_gradient in self._attentions(row):
            required += attention * (3 if has_gradient else 1)
            recomputed += attention * (self._checkpointing and has_gradient)
        return Work(required, recomputed)

    def _attentions(self, row: RowSize) -> Iterator[tuple[int, bool]]:
        """Yield the forward FLOPs of each attention, and whether it has a backward pass."""
        squares = sum(length**2 for length in row.segments)
        for number in range(self._num_layers):
            yield 4 * self._text_width * squares, self._trains_before((3, number, 1))
        for number in range(self._num_blocks):
            pairs = sum(t * self._pairs(h, w, whole=number in self._full) for t, h, w in row.grids)
            yield 4 * self._vision_width * pairs, self._trains_before((0, number, 1))

    def _pairs(self, height: int, width: int, *, whole: bool) -> int:
        """Return the number of patch pairs of a frame that attend to each other, globally or per window."""
        if whole or not self._window:
            return (height * width) ** 2
        return _squares(height, self._window) * _squares(width, self._window)

    def _trains_before(self, at: Place) -> bool:
        return self._first < at


def _squares(length: int, part: int) -> int:
    """Split `length` into parts of size `part` and a rest. Return the sum of their squares."""
    return length // part * part**2 + (length % part) ** 2


def place(name: str) -> Place:
    """Return the position of a module or parameter in the forward pass. Smaller positions run earlier."""
    parts = name.split(".")
    number = next((int(word) for word in parts if word.isdigit()), 0)
    if name.startswith(VISION):
        if "merger" in name:
            stage = 0 if "norm" in name or "ln_q" in name else 1
            return (1, 0, 2 if "2" in parts or "linear_fc2" in parts else stage)
        if ".blocks." not in name:
            return (0, -1, 0)
        return (0, number, 0 if any(word in ("norm1", "qkv", "q", "k", "v") for word in parts) else 1)
    if ".layers." in name:
        early = any(word in FIRST or word == "input_layernorm" for word in parts)
        return (3, number, 0 if early else 1)
    return (2, 0, 0) if "embed_tokens" in name else (4, 0, 0)


def first_trained(network: nn.Module) -> Place:
    """Return the earliest trainable position, where the backward pass ends."""
    return min(place(name) for name, parameter in network.named_parameters() if parameter.requires_grad)


def layers_of(network: nn.Module) -> Iterator[Layer]:
    """Yield the linear layers of a model, including adapters. Experts count by the share that is active per token."""
    config: Any = network.config
    text = config.get_text_config()
    first = first_trained(network)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        is_embedding = "embed" in name and "patch_embed" not in name  # table lookup without multiplications
        if parameter.ndim < 2 or is_embedding:
            continue
        share = 1.0
        if ".experts." in name and parameter.ndim == 3:
            share = text.num_experts_per_tok / text.num_experts
        position = place(name)
        is_lora_b = ".lora_B." in name  # its lora_A runs before it
        in_block = ".blocks." in name or ".layers." in name
        yield Layer(
            kind=_kind(name),
            weights=round(parameter.numel() * share),
            trains=parameter.requires_grad,
            passes_on="patch_embed" not in name and ((is_lora_b and parameter.requires_grad) or first < position),
            repeated=in_block and not name.endswith(LAST) and first < (*position[:2], 2),
        )


def _kind(name: str) -> str:
    if name.startswith(VISION):
        return "merged" if "merger" in name else "patch"
    return "labelled" if name.startswith(HEAD) else "token"
