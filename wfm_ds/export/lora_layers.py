"""LoRA layers, independent of file formats: their weight updates, and functions that fuse and split layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wfm_ds.errors import ModelError

LoraLayers = dict[str, "LoraLayer"]  # {diffusers layer name: layer}


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The LoRA update of one layer. It adds alpha / rank * B @ A to the layer's weight.

    With DoRA (arXiv 2402.09353), each row of the new weight is then scaled to the norm in `magnitude`.
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
        return torch.Size([len(self.B), *self.A.shape[1:]])

    def delta(self) -> Tensor:
        """Return the update alpha / rank * B @ A, float32, in the shape of the weight. DoRA scaling is not applied."""
        product: Tensor = self.B.float().flatten(1) @ self.A.float().flatten(1)
        return product.view(self.weight_shape) * self.scale

    def merge_weight(self, weight: Tensor) -> Tensor:
        """Return the weight with the LoRA merged into it, float32. DoRA scaling is included."""
        merged = weight.float() + self.delta()
        return (
            merged
            if self.magnitude is None
            else merged * broadcast_rows(self.magnitude.float() / row_norms(merged), merged)
        )

    def bake_alpha(self) -> LoraLayer:
        """Return an equivalent layer with alpha = rank, for tools that ignore alpha."""
        return replace(self, B=self.B * self.scale, alpha=float(self.rank))


def row_norms(weight: Tensor) -> Tensor:
    """Return the norm of each output row of a weight, as float32 [out]."""
    norms: Tensor = weight.float().flatten(1).norm(dim=1)
    return norms


def broadcast_rows(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def fuse_layers(members: Sequence[LoraLayer | None], sizes: Sequence[int] = ()) -> LoraLayer:
    """Fuse LoRA layers into one LoRA layer. The A matrices are stacked, and the new B is block-diagonal.

    Each member gets consecutive output rows. The rows of a None member have no update.
    sizes: relative numbers of rows of the members (default: equal).
    Raises ModelError if only some members use DoRA.
    """
    sizes = sizes or [1] * len(members)
    first, unit = next(
        (member, len(member.B) // size) for member, size in zip(members, sizes, strict=True) if member is not None
    )
    scales = {member.scale for member in members if member is not None}
    filled = [
        _zero_layer(first, unit * size) if member is None else member
        for member, size in zip(members, sizes, strict=True)
    ]
    if len(scales) > 1:
        filled = [member.bake_alpha() for member in filled]
    elif None in members:
        filled = [replace(member, alpha=first.scale * member.rank) for member in filled]
    magnitudes = [member.magnitude for member in members if member is not None and member.magnitude is not None]
    if magnitudes and len(magnitudes) < len(members):
        raise ModelError("several layers form one original layer, but only some of them have DoRA; target all of them")
    B = first.B.new_zeros(unit * sum(sizes), sum(member.rank for member in filled), *first.B.shape[2:])
    row = column = 0
    for member in filled:
        B[row : row + len(member.B), column : column + member.rank] = member.B
        row, column = row + len(member.B), column + member.rank
    return LoraLayer(
        torch.cat([member.A for member in filled]),
        B,
        sum(member.alpha for member in filled),
        torch.cat(magnitudes) if magnitudes else None,
    )


def _zero_layer(like: LoraLayer, rows: int) -> LoraLayer:
    return LoraLayer(torch.zeros_like(like.A), like.B.new_zeros(rows, *like.B.shape[1:]), like.alpha)


def split_layer(layer: LoraLayer, sizes: Sequence[int]) -> list[LoraLayer | None]:
    """Split a LoRA layer into layers for ranges of its output rows. This is the inverse of `fuse_layers`.

    sizes: relative numbers of rows of the new layers. If B is block-diagonal, new layers without an update become None.
    Raises ModelError if the rows cannot be split in this way.
    """
    num_parts = len(sizes)
    if len(layer.B) % sum(sizes):
        raise ModelError(f"{len(layer.B)} output rows cannot be split into {num_parts} layers")
    rank, rows = layer.rank // num_parts, [len(layer.B) // sum(sizes) * size for size in sizes]
    parts = torch.split(layer.B, rows)
    magnitudes = [None] * num_parts if layer.magnitude is None else list(torch.split(layer.magnitude, rows))
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


def is_same_update(ours: LoraLayers, theirs: LoraLayers, tolerance: float = 1e-6) -> bool:
    """Return whether two LoRAs have the same weight updates. DoRA magnitudes are not compared.

    tolerance: maximum norm of the difference between two updates, relative to the norm of the update in `ours`.
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
