"""LoRA layers, independent of file formats: their weight updates, and fusing and splitting of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from wfm_ds.errors import ModelError

LoraLayers = dict[str, "LoraLayer"]  # by diffusers layer name


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The LoRA update of one layer: alpha / rank * B A is added to its weight W.

    With a magnitude m (DoRA, arXiv 2402.09353), each row of the sum is scaled to the norm m.
    """

    A: Tensor  # [rank, in]; for a convolution [rank, in, kh, kw]
    B: Tensor  # [out, rank]; for a convolution [out, rank, 1, 1]
    alpha: float
    magnitude: Tensor | None = None  # [out]

    @property
    def rank(self) -> int:
        return len(self.A)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight_shape(self) -> torch.Size:
        """Shape of the adapted weight."""
        return torch.Size([len(self.B), *self.A.shape[1:]])

    def delta(self) -> Tensor:
        """Return the weight update alpha / rank * B A in the weight's shape, float32, without DoRA scaling."""
        product: Tensor = self.B.float().flatten(1) @ self.A.float().flatten(1)
        return product.view(self.weight_shape) * self.scale

    def merge_weight(self, weight: Tensor) -> Tensor:
        """Return the weight with the LoRA (and its DoRA magnitude) merged into it, float32."""
        merged = weight.float() + self.delta()
        return (
            merged
            if self.magnitude is None
            else merged * broadcast_rows(self.magnitude.float() / row_norms(merged), merged)
        )

    def bake_alpha(self) -> LoraLayer:
        """Return an equivalent layer with alpha = rank, for readers that ignore alpha."""
        return replace(self, B=self.B * self.scale, alpha=float(self.rank))


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each output row of a weight, [out] float32."""
    norms: Tensor = weight.float().flatten(1).norm(dim=1)
    return norms


def broadcast_rows(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def fuse_layers(members: Sequence[LoraLayer | None]) -> LoraLayer:
    """Fuse layers into one layer: A is stacked, B is block-diagonal. Each member updates an equal range of output rows.

    A member None stands for rows without an adapter, which get zero matrices. Raises ModelError if only some members
    are DoRA.
    """
    first = next(member for member in members if member is not None)
    rows, scales = len(first.B), {member.scale for member in members if member is not None}
    filled = [_zero_layer(first) if member is None else member for member in members]
    if len(scales) > 1:
        filled = [member.bake_alpha() for member in filled]
    elif None in members:
        filled = [replace(member, alpha=first.scale * member.rank) for member in filled]
    magnitudes = [member.magnitude for member in members if member is not None and member.magnitude is not None]
    if magnitudes and len(magnitudes) < len(members):
        raise ModelError("cannot fuse DoRA of only some layers that form one original layer; target all of them")
    B = first.B.new_zeros(rows * len(filled), sum(member.rank for member in filled), *first.B.shape[2:])
    column = 0
    for index, member in enumerate(filled):
        B[index * rows : (index + 1) * rows, column : column + member.rank] = member.B
        column += member.rank
    return LoraLayer(
        torch.cat([member.A for member in filled]),
        B,
        sum(member.alpha for member in filled),
        torch.cat(magnitudes) if magnitudes else None,
    )


def _zero_layer(like: LoraLayer) -> LoraLayer:
    return LoraLayer(torch.zeros_like(like.A), torch.zeros_like(like.B), like.alpha)


def split_layer(layer: LoraLayer, num_parts: int) -> list[LoraLayer | None]:
    """Split a layer into a list of `num_parts` layers, each for an equal range of its output rows.

    Inverse of `fuse_layers`, also for layers that other tools wrote. If B is block-diagonal, each new layer gets only
    its own block of A and B. A list entry is None if its rows have no update.
    """
    rows, rank = len(layer.B) // num_parts, layer.rank // num_parts
    parts = [layer.B[i * rows : (i + 1) * rows] for i in range(num_parts)]
    magnitudes = [None] * num_parts if layer.magnitude is None else list(layer.magnitude.chunk(num_parts))
    blocks = [part[:, i * rank : (i + 1) * rank] for i, part in enumerate(parts)]
    block_diagonal = layer.rank % num_parts == 0 and all(
        torch.count_nonzero(part) == torch.count_nonzero(block) for part, block in zip(parts, blocks, strict=True)
    )
    if not block_diagonal:
        return [replace(layer, B=part, magnitude=m) for part, m in zip(parts, magnitudes, strict=True)]
    members = [
        LoraLayer(layer.A[i * rank : (i + 1) * rank], block, layer.alpha * rank / layer.rank, magnitudes[i])
        for i, block in enumerate(blocks)
    ]
    return [None if m.magnitude is None and not m.A.any() and not m.B.any() else m for m in members]


def layer_alpha(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return a layer's alpha from PEFT's settings. For rsLoRA it is multiplied by sqrt(rank).

    The scale of the layer is then always alpha / rank.
    """
    patterns = settings.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), module), settings["lora_alpha"]))
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def layer_rank(settings: Mapping[str, Any], module: str) -> int:
    """Return a layer's rank from PEFT's settings (r and rank_pattern)."""
    patterns = settings.get("rank_pattern") or {}
    return int(patterns.get(get_pattern_key(list(patterns), module), settings["r"]))


def is_same_update(ours: LoraLayers, theirs: LoraLayers, tolerance: float = 1e-6) -> bool:
    """Return whether two LoRAs have equal updates.

    tolerance: maximum norm of the difference, relative to the norm of the update.
    """
    if ours.keys() != theirs.keys():
        return False
    for name, layer in ours.items():
        other = theirs[name]
        if layer.alpha == other.alpha and torch.equal(layer.A, other.A) and torch.equal(layer.B, other.B):
            continue
        delta = layer.delta()
        if layer.weight_shape != other.weight_shape:
            return False
        if float((delta - other.delta()).norm()) > tolerance * float(delta.norm()):
            return False
    return True
