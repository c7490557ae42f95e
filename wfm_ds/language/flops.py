"""Floating-point operations of a vision-language model on packed sequences, from layer shapes and token counts.

A multiply-add counts as 2 operations. Pointwise operations are ignored. The cost of attention is proportional to the
sum of the squared conversation lengths. In the backward pass of a layer, the gradient of its input and the gradient of
its weights each cost as much as the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from wfm_ds.engine.flop_counter import FlopCount
from wfm_ds.language.packed_sequences import PackedSequence

VISION, DECODER, HEAD = "model.visual.", "model.language_model.", "lm_head."
INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # first linear layers of a block
# Last linear layers of a block. The backward pass does not need their output, so checkpointing does not recompute them.
OUTPUT_WEIGHTS = ("down_proj.weight", "linear_fc2.weight", "down_proj.lora_B.default.weight")
LayerPosition: TypeAlias = tuple[int, int, int]  # model component, block in it, stage within the block


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer: its number of weights, and the type of its inputs (such as tokens or patches)."""

    kind: str  # its inputs: `patch`, `merged` (merged patches), `token` or `labelled` (labelled tokens)
    weights: int  # number of weights per item
    is_trained: bool
    has_input_gradient: bool  # an earlier parameter is trained, so its input has a gradient
    is_recomputed: bool  # recomputed by gradient checkpointing


class SequenceWork:
    """FLOP counter for packed sequences.

    Create it after adapters are added and parameters are frozen, but before the model is sharded.
    """

    def __init__(self, network: Any, *, checkpointing: bool) -> None:
        self._layers = list(find_layers(network))
        config = network.config
        text, vision = config.get_text_config(), config.vision_config
        self._merge = int(vision.spatial_merge_size)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._text_width = text.num_attention_heads * head_dim
        self._vision_width = int(vision.hidden_size)
        self._first = first_trainable_position(network)
        self._num_layers, self._num_blocks = int(text.num_hidden_layers), int(vision.depth)
        self._full = set(getattr(vision, "fullatt_block_indexes", range(self._num_blocks)))
        side = getattr(vision, "window_size", 0) // int(vision.patch_size)
        self._window = side // self._merge * self._merge
        self._checkpointing = checkpointing
        self._recorded = FlopCount()

    def record(self, sequence: PackedSequence) -> None:
        self._recorded += self.estimate(sequence)

    def pop_work(self) -> FlopCount:
        work, self._recorded = self._recorded, FlopCount()
        return work

    def estimate(self, sequence: PackedSequence) -> FlopCount:
        """Return the FLOPs of a forward and backward pass on one sequence, with recomputation as a separate number."""
        tables = [grids for name, grids in sequence.media.items() if name.endswith("grid_thw")]
        grids = [(int(t), int(h), int(w)) for table in tables for t, h, w in table.tolist()]
        patches = sum(t * h * w for t, h, w in grids)
        items = {"patch": patches, "merged": patches // self._merge**2}
        items |= {"token": sum(sequence.segments), "labelled": len(sequence.label_positions)}
        required = recomputed = 0
        for layer in self._layers:
            forward = 2 * layer.weights * items[layer.kind]
            required += forward * (1 + layer.is_trained + layer.has_input_gradient)
            recomputed += forward * (layer.is_recomputed and self._checkpointing)
        for attention, has_gradient in self._attention_flops(sequence.segments, grids):
            required += attention * (3 if has_gradient else 1)
            recomputed += attention * (self._checkpointing and has_gradient)
        return FlopCount(required, recomputed)

    def _attention_flops(
        self, segments: Sequence[int], grids: Sequence[tuple[int, int, int]]
    ) -> Iterator[tuple[int, bool]]:
        """Yield (FLOPs of the forward pass, whether it has a backward pass) for each attention layer.

        segments: tokens of each conversation. grids: patches of each image or video along time, height and width.
        """
        squares = sum(length**2 for length in segments)
        for number in range(self._num_layers):
            yield 4 * self._text_width * squares, self._first < (3, number, 1)
        for number in range(self._num_blocks):
            if number in self._full or not self._window:
                pairs = sum(t * (h * w) ** 2 for t, h, w in grids)
            else:  # patches attend only within their window
                pairs = sum(t * _sum_squares(h, self._window) * _sum_squares(w, self._window) for t, h, w in grids)
            yield 4 * self._vision_width * pairs, self._first < (0, number, 1)


def _sum_squares(length: int, part: int) -> int:
    return length // part * part**2 + (length % part) ** 2


def layer_position(name: str) -> LayerPosition:
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
        early = any(word in INPUT_PROJECTIONS or word == "input_layernorm" for word in parts)
        return (3, number, 0 if early else 1)
    return (2, 0, 0) if "embed_tokens" in name else (4, 0, 0)


def first_trainable_position(network: nn.Module) -> LayerPosition:
    return min(layer_position(name) for name, parameter in network.named_parameters() if parameter.requires_grad)


def find_layers(network: nn.Module) -> Iterator[Layer]:
    """Yield the linear layers of a model, including adapters.

    Counts only the fraction of expert weights that is active for a token.
    """
    config: Any = network.config
    text = config.get_text_config()
    first = first_trainable_position(network)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        is_embedding = "embed" in name and "patch_embed" not in name  # table lookup without multiplications
        if parameter.ndim < 2 or is_embedding:
            continue
        share = 1.0
        if ".experts." in name and parameter.ndim == 3:
            share = text.num_experts_per_tok / text.num_experts
        kind = "labelled" if name.startswith(HEAD) else "token"
        if name.startswith(VISION):
            kind = "merged" if "merger" in name else "patch"
        position = layer_position(name)
        is_lora_b = ".lora_B." in name  # its lora_A runs before it
        in_block = ".blocks." in name or ".layers." in name
        yield Layer(
            kind=kind,
            weights=round(parameter.numel() * share),
            is_trained=parameter.requires_grad,
            has_input_gradient="patch_embed" not in name
            and ((is_lora_b and parameter.requires_grad) or first < position),
            is_recomputed=in_block and not name.endswith(OUTPUT_WEIGHTS) and first < (*position[:2], 2),
        )
