"""Extracts a LoRA from a fully trained model, as the best low-rank approximation of the weight changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.export.lora_layers import LoraLayer, LoraLayers
from wfm_ds.export.target import ExportTarget


@dataclass
class LoraExtraction:
    """A LoRA of one denoiser component, with statistics about how well the LoRA approximates the weight changes."""

    layers: LoraLayers = field(default_factory=dict)
    squares: float = 0.0  # sum of squares of all weight differences, including tensors without a LoRA
    kept_squares: float = 0.0
    skipped_tensors: list[str] = field(default_factory=list)  # changed tensors other than weights of linear layers

    @property
    def kept_fraction(self) -> float:
        """Fraction of the sum of squared weight changes that the LoRA represents."""
        return self.kept_squares / self.squares if self.squares else 1.0


def extract_lora(
    trained: ExportTarget, base: ExportTarget, part: str, rank: int | None, energy: float | None
) -> LoraExtraction:
    """Compute a LoRA for component `part` of `base` that approximates the weights of `trained`. Alpha equals the rank.

    rank: maximum rank of a layer.
    energy: fraction of a layer's sum of squared weight changes that the LoRA should represent. A layer gets the
    smallest rank that reaches this fraction, but at most `rank`.
    Raises ModelError if the models have different tensors, or if all their linear layers have equal weights.
    """
    extraction = LoraExtraction()
    shapes, trained_weights, base_weights = (
        base.tensor_shapes(part),
        trained.base_weights(part),
        base.base_weights(part),
    )
    if trained.tensor_shapes(part) != shapes:
        raise ModelError(
            f"{trained.base} and {base.base} are not versions of the same model: the tensors of {part} differ"
        )
    linear_weights = {
        f"{n}.weight" for n, m in base.meta_network(part).named_modules() if isinstance(m, torch.nn.Linear)
    }
    for name in shapes:
        difference = trained_weights.read_tensor(name).float() - base_weights.read_tensor(name).float()
        squares = float(difference.double().square().sum())
        extraction.squares += squares
        if squares == 0:
            continue
        if name not in linear_weights:
            extraction.skipped_tensors.append(name)
            continue
        layer, kept = approximate_difference(difference, rank, energy)
        extraction.layers[name.removesuffix(".weight")] = layer
        extraction.kept_squares += kept
    if not extraction.layers:
        raise ModelError(f"{trained.base} and {base.base} have equal linear layers: there is nothing to extract")
    return extraction


def approximate_difference(difference: Tensor, rank: int | None, energy: float | None) -> tuple[LoraLayer, float]:
    """Approximate a weight difference [outputs, inputs]. Return (LoRA, sum of squares that the LoRA represents).

    The LoRA is the truncated SVD, the best approximation of its rank (Eckart-Young).
    """
    U, S, V = torch.linalg.svd(difference, full_matrices=False)
    squares = S.double().square()
    num_components = len(S) if rank is None else min(rank, len(S))
    if energy is not None:
        components_for_energy = int(torch.searchsorted(squares.cumsum(0), energy * squares.sum())) + 1
        num_components = min(num_components, components_for_energy)
    root = S[:num_components].sqrt()
    A, B = root[:, None] * V[:num_components], U[:, :num_components] * root
    return LoraLayer(A.contiguous(), B.contiguous(), float(num_components)), float(squares[:num_components].sum())
