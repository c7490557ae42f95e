"""DGPO (arXiv 2510.08425): direct group preference optimization, weighted by advantages.

The loss decreases the velocity errors of samples with positive advantage and increases the errors of other samples. The
weight of a group is large at first. It decreases when the policy prefers the better samples of the group more strongly
than the reference policy does. Samples of a group share noise levels and noise, so that their errors are comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess, ForwardTerm
from wfm_ds.recipe.algorithms import DgpoAlgorithm
from wfm_ds.sampling.latents import require_latents, sample_mean

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.types import Rollout


class Dgpo(ForwardProcess):
    """DGPO loss, with error l = mean((v - u)^2), target u = noise - clean latents, advantage A and group size K:

        loss = sigmoid(sum over the group of A beta (l - l_ref) / K) A l

    The sum is over a group's samples at one noise level. The sigmoid is a constant in the backward pass.
    """

    Settings = DgpoAlgorithm
    area = "dgpo"
    references = ("ref",)
    uses_group_statistics = True
    settings: DgpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.group_size = recipe.rl.rollout.group_size

    def noise_key(self, rollout: Rollout) -> tuple[int | str, ...]:
        return (rollout.group_id,)

    def has_gradient(self, term: ForwardTerm, equal_policies: Set[str]) -> bool:
        return term.advantage != 0

    def group_statistics(
        self,
        terms: Sequence[ForwardTerm],
        velocity: Tensor,
        batch: ForwardBatch,
        references: Mapping[str, Tensor],
    ) -> tuple[list[str], Tensor]:
        """See RlAlgorithm. The noise seed serves as group id.

        Two loss terms have the same noise seed only if their samples are in the same group and have the same noise
        level.
        """
        errors, ref_errors = self._velocity_errors(velocity, batch), self._velocity_errors(references["ref"], batch)
        contributions = batch.credit * self.settings.beta * (errors - ref_errors) / self.group_size
        return [str(term.noise_seed) for term in terms], contributions

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        assert batch.group_statistics is not None, "set by the RL loop"
        weight_B = torch.sigmoid(batch.group_statistics)
        errors = self._velocity_errors(velocity, batch)
        stats: Stats = {
            "dgpo/group_weight": weight_B,
            "dgpo/error": errors.detach(),
            "kl/ref": sample_mean((velocity.detach() - references["ref"]).square(), batch.loss_mask),
        }
        return weight_B * batch.credit * errors, stats

    def _velocity_errors(self, velocity: Tensor, batch: ForwardBatch) -> Tensor:
        require_latents(velocity=velocity, clean=batch.clean_latents, noise=batch.noise)
        return sample_mean((velocity - (batch.noise - batch.clean_latents)).square(), batch.loss_mask)
