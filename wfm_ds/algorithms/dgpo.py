"""DGPO (arXiv 2510.08425): direct preference optimization between the samples of a group, weighted by advantages.

The errors of good samples shrink and those of bad ones grow, the more the less a group as a whole is preferred yet. All
samples of a group have the same noise levels and noise, so that their errors can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess, ForwardTerm
from wfm_ds.recipe.algorithms import DgpoAlgorithm
from wfm_ds.sampling.shapes import require_latents, sample_mean

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelFacts
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.types import Rollout


class Dgpo(ForwardProcess):
    """With l = mean((v - u)^2), A the advantage and K the group's size:

    loss = sigmoid(sum over the group of A beta (l - l_ref) / K) A l,   the sigmoid held constant, at each noise level
    """

    Settings = DgpoAlgorithm
    area = "dgpo"
    references = ("ref",)
    surveys = True
    settings: DgpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.group_size = recipe.rl.rollout.group_size

    def key(self, rollout: Rollout) -> tuple[int | str, ...]:
        return (rollout.group_id,)

    def has_gradient(self, term: ForwardTerm, current: Set[str]) -> bool:
        return term.advantage != 0

    def survey_key(self, term: ForwardTerm) -> str:
        """The noise of a group at one of its levels has a seed of its own."""
        return str(term.noise_seed)

    def surveyed(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> Tensor:
        errors, ref_errors = self._errors(velocity, batch), self._errors(references["ref"], batch)
        return batch.credit * self.settings.beta * (errors - ref_errors) / self.group_size

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        assert batch.survey is not None, "the loop surveys"
        weight_B = torch.sigmoid(batch.survey)
        errors = self._errors(velocity, batch)
        stats: Stats = {
            "dgpo/group_weight": weight_B,
            "dgpo/error": errors.detach(),
            "kl/ref": sample_mean((velocity.detach() - references["ref"]).square(), batch.free),
        }
        return weight_B * batch.credit * errors, stats

    def _errors(self, velocity: Tensor, batch: ForwardBatch) -> Tensor:
        """l of each term [B]."""
        require_latents(velocity=velocity, clean=batch.clean, noise=batch.noise)
        return sample_mean((velocity - (batch.noise - batch.clean)).square(), batch.free)
