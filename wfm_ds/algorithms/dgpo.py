"""DGPO (arXiv 2510.08425): direct group preference optimization, weighted by advantages.

Samples of a group have the same noise levels and noise, so that their velocity errors are comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess, ForwardTerm
from wfm_ds.algorithms.policy_ratio import outside_clip_range, ratio_stats
from wfm_ds.recipe.algorithms import DgpoAlgorithm
from wfm_ds.sampling.latents import sample_mean

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.types import Rollout


OLD_DECAY_SLOPE, MAX_OLD_DECAY = 0.001, 0.3


class Dgpo(ForwardProcess):
    """DGPO. The loss of a sample at one noise level is

        sigmoid(sum_group(A * beta * (l - l_ref) / K)) * A * l + kl_beta * mean((v - v_ref)^2)

    A is the advantage, K the group size, and l = mean((v - u)^2) the error of the velocity v for the target u = noise -
    clean latents. v_ref and l_ref are the velocity and the error of the reference policy. sum_group sums over the
    samples of the group. The sigmoid has no gradient.

    With clip_ratio, A * l has no gradient either if exp(l_old - l) is above the clip range and A > 0, or below the clip
    range and A <= 0. l_old is the error of the old policy, a moving average of the trained weights.
    """

    Settings = DgpoAlgorithm
    area = "dgpo"
    uses_group_statistics = True
    settings: DgpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.group_size = recipe.rl.rollout.group_size
        self.references = ("ref",) if self.settings.clip_ratio is None else ("ref", "old")

    def noise_key(self, rollout: Rollout) -> tuple[int | str, ...]:
        return (rollout.group_id,)

    def noise_levels(self, step: int, *key: int | str) -> list[tuple[int, float]]:
        return super().noise_levels(step)

    def group_statistics(
        self,
        terms: Sequence[ForwardTerm],
        velocity: Tensor,
        batch: ForwardBatch,
        references: Mapping[str, Tensor],
    ) -> tuple[list[str], Tensor]:
        """See RlAlgorithm. The group id of a loss term is its noise seed, unique to a group and noise level."""
        errors, ref_errors = batch.velocity_errors(velocity), batch.velocity_errors(references["ref"])
        contributions = batch.credit * self.settings.beta * (errors - ref_errors) / self.group_size
        return [str(term.noise_seed) for term in terms], contributions

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        assert batch.group_statistics is not None, "set by the RL loop"
        weight_B = torch.sigmoid(batch.group_statistics)
        errors = batch.velocity_errors(velocity)
        v = velocity if self.has_regularizer else velocity.detach()
        distance = sample_mean((v - references["ref"]).square(), batch.loss_mask)
        stats: Stats = {"dgpo/group_weight": weight_B, "dgpo/error": errors.detach(), "kl/ref": distance.detach()}
        if (clip := self.settings.clip_ratio) is not None:
            old_errors = batch.velocity_errors(references["old"]) if "old" in references else errors
            log_ratio = (old_errors - errors).detach()
            higher, lower = outside_clip_range(log_ratio, clip, clip)
            stats |= ratio_stats(log_ratio, higher, lower, batch.credit)
            errors = torch.where(torch.where(batch.credit > 0, higher, lower), errors.detach(), errors)
        policy = weight_B * batch.credit * errors
        stats["loss/policy"] = policy.detach()
        if not self.has_regularizer:
            return policy, stats
        return policy + self.settings.kl_beta * distance, stats | {"loss/kl": distance.detach()}

    def policy_decays(self, step: int, num_updates: int) -> Mapping[str, float]:
        if self.settings.clip_ratio is None:
            return {}
        return {"old": min(OLD_DECAY_SLOPE * max(num_updates - 1, 0), MAX_OLD_DECAY)}
