"""Reinforce Adjoint Matching (RAM, arXiv 2605.10759): flow matching towards a reference that the reward shifts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess
from wfm_ds.recipe.algorithms import RamAlgorithm
from wfm_ds.sampling.latents import require_latents, require_vectors, sample_mean


def ram_loss(
    velocity: Tensor, ref_velocity: Tensor, clean: Tensor, noise: Tensor, tilt: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return mean((v - target)^2) of each sample, [B], with v = velocity.

    The target is v_ref + R*(u - v) with v_ref = ref_velocity and u = noise - clean, without gradient. Velocities and
    latents are [B,C,h,w] or [B,C,T,h,w] float32. Both velocities are predictions at the same noisy latents. tilt: R,
    [B]. mask: as in sample_mean. Raises ValueError for other shapes and dtypes.
    """
    require_latents(velocity=velocity, ref_velocity=ref_velocity, clean=clean, noise=noise)
    require_vectors(velocity, tilt=tilt)
    factor = tilt.view(-1, *[1] * (velocity.ndim - 1))
    target = (ref_velocity + factor * (noise - clean - velocity)).detach()
    return sample_mean((velocity - target).square(), mask)


class Ram(ForwardProcess):
    Settings = RamAlgorithm
    area = "ram"
    settings: RamAlgorithm
    references = ("ref",)

    def credit_from_advantage(self, advantage: float) -> float:
        tilt = self.settings.multiplier * advantage
        return math.expm1(tilt) if self.settings.tilt == "exp" else tilt

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        mask = batch.loss_mask
        loss = ram_loss(velocity, references["ref"], batch.clean_latents, batch.noise, batch.credit, mask)
        detached = velocity.detach()
        distance = sample_mean((detached - references["ref"]).square(), mask)
        return loss, {
            "loss/policy": loss.detach(),
            "kl/ref": distance,
            "ram/velocity_error": batch.velocity_errors(detached),
            "ram/tilt_abs_mean": batch.credit.abs(),
        }
