"""A LoRA of what full training changed: the best approximation of each layer's difference of a given rank (SVD)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wfm_ds.checkpoint.lora_layers import LoraLayer, LoraLayers
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.errors import ModelError


@dataclass
class Extraction:
    """The LoRA of one part, and how much of the change it has."""

    layers: LoraLayers = field(default_factory=dict)
    squares: float = 0.0  # of all differences, those of tensors that no LoRA is put on too
    kept: float = 0.0
    left_out: list[str] = field(default_factory=list)  # changed tensors that are no weights of linear layers

    @property
    def share(self) -> float:
        """Share of the squared change that the LoRA has."""
        return self.kept / self.squares if self.squares else 1.0


def extract(trained: ExportTarget, base: ExportTarget, part: str, rank: int | None, energy: float | None) -> Extraction:
    """Approximate `trained` by `base` and a LoRA with alpha = rank. rank: of every layer at most; energy: the share of
    a layer's squared change to keep, which gives each layer a rank of its own. Raises ModelError for two models that do
    not have the same tensors."""
    found = Extraction()
    shapes, own, theirs = base.shapes(part), trained.stored(part), base.stored(part)
    if trained.shapes(part) != shapes:
        raise ModelError(f"{trained.base} and {base.base} are no two versions of one model: their {part}s differ")
    linear = {f"{n}.weight" for n, m in base.bare(part).named_modules() if isinstance(m, torch.nn.Linear)}
    for name in shapes:
        difference = own.tensor(name).float() - theirs.tensor(name).float()
        squares = float(difference.double().square().sum())
        found.squares += squares
        if squares == 0:
            continue
        if name not in linear:
            found.left_out.append(name)
            continue
        layer, kept = nearest(difference, rank, energy)
        found.layers[name.removesuffix(".weight")] = layer
        found.kept += kept
    if not found.layers:
        raise ModelError(f"{trained.base} and {base.base} have the same linear layers: there is nothing to extract")
    return found


def nearest(difference: Tensor, rank: int | None, energy: float | None) -> tuple[LoraLayer, float]:
    """The LoRA nearest to a difference [out, in] (Eckart-Young), its scale shared out equally between A and B; and the
    squares that it has of it."""
    U, S, V = torch.linalg.svd(difference, full_matrices=False)
    squares = S.double().square()
    chosen = len(S) if rank is None else min(rank, len(S))
    if energy is not None:
        enough = int(torch.searchsorted(squares.cumsum(0), energy * squares.sum())) + 1
        chosen = min(chosen, enough)
    root = S[:chosen].sqrt()
    A, B = root[:, None] * V[:chosen], U[:, :chosen] * root
    return LoraLayer(A.contiguous(), B.contiguous(), float(chosen)), float(squares[:chosen].sum())
