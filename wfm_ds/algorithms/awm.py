"""Advantage Weighted Matching (AWM, arXiv 2509.25050): PPO on the forward process.

The log-probability of a sample is the negative flow-matching loss of its clean latents after adding noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess
from wfm_ds.algorithms.policy_ratio import outside_clip_range, ppo_clip_loss, ratio_stats
from wfm_ds.recipe.algorithms import AwmAlgorithm
from wfm_ds.sampling.latents import require_latents, require_vectors, sample_mean

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe

POWER_OFFSET = 1e-10  # added to the squared error before the power, because the slope of a power can be infinite at 0


def matching_log_prob(error: Tensor, sigma: Tensor, weighting: str, power: float) -> Tensor:
    """Return the surrogate log-probability of each sample, [B], at most 0.

    error: l, the mean squared velocity error, [B] float32. sigma: noise level, [B] float32. The result for each
    `weighting` is:

        uniform        -l
        sigma          -sigma * l
        sigma_squared  -sigma^2 * l
        ghuber         -sigma * ((l + 1e-10)^power - 1e-10^power) / power

    Raises ValueError for wrong shapes.
    """
    require_vectors(error, error=error, sigma=sigma)
    if weighting == "ghuber":
        at_zero: float = POWER_OFFSET**power
        return -sigma * ((error + POWER_OFFSET).pow(power) - at_zero) / power
    return -{"uniform": torch.ones_like(sigma), "sigma": sigma, "sigma_squared": sigma.square()}[weighting] * error


class Awm(ForwardProcess):
    Settings = AwmAlgorithm
    area = "awm"
    settings: AwmAlgorithm
    uses_old_predictions = True

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        kl_betas = {"ref": self.settings.kl_beta, "ema": self.settings.ema_kl_beta}
        self.kl_betas = {policy: beta for policy, beta in kl_betas.items() if beta > 0}
        self.references = ("old", *self.kl_betas)

    def credit_from_advantage(self, advantage: float) -> float:
        return advantage / self.settings.adv_clip_max * self.settings.adv_max

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        require_latents(velocity=velocity, **references)
        log_prob = self._log_prob(velocity, batch)
        # `old` is missing if its weights equal the trained weights. Both log-probabilities are then bit-identical.
        old_log_prob = self._log_prob(references["old"], batch) if "old" in references else log_prob.detach()
        log_ratio, clip = log_prob - old_log_prob, self.settings.clip_ratio
        policy = loss = ppo_clip_loss(log_ratio, batch.credit, clip, clip)
        stats: Stats = {
            "loss/policy": policy.detach(),
            "policy/log_prob_mean": log_prob.detach(),
            "policy/approx_kl": 0.5 * log_ratio.detach().square(),
        }
        for name, beta in self.kl_betas.items():
            distance = sample_mean((velocity - references[name]).square(), batch.loss_mask)
            loss = loss + beta * distance
            stats[f"kl/{name}"] = distance.detach()
        if "kl/ref" in stats:
            stats["loss/kl"] = stats["kl/ref"]
        outside = outside_clip_range(log_ratio.detach(), clip, clip)
        return loss, stats | ratio_stats(log_ratio.detach(), *outside, batch.credit)

    def _log_prob(self, velocity: Tensor, batch: ForwardBatch) -> Tensor:
        error = batch.velocity_errors(velocity)
        return matching_log_prob(error, batch.sigma, self.settings.weighting, self.settings.power)
