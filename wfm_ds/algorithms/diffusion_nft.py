"""DiffusionNFT (arXiv 2509.16117): reinforcement learning on the forward process, without log-probabilities.

The loss moves the velocity towards samples with a high reward and away from samples with a low reward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.forward_process import ForwardBatch, ForwardProcess, ForwardTerm
from wfm_ds.recipe.algorithms import NftAlgorithm
from wfm_ds.sampling.latents import StreamWeights, require_latents, require_vectors, sample_mean
from wfm_kernels import nft_loss as fused_nft_loss

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import DecaySchedule
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe

# Decay of the old policy, by preset: (number of optimizer steps with the initial decay, initial decay, increase in each
# later step, maximum decay).
OLD_DECAY_PRESETS = {
    "copy": (0, 0.0, 0.0, 0.0),
    "standard": (0, 0.0, 0.001, 0.5),
    "slow": (75, 0.0, 0.0075, 0.999),
}

NEUTRAL_REWARD_WEIGHT = 0.5  # reward weight at advantage 0


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    clean_latents: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    *,
    beta: float,
    adv_clip_max: float,
    kl_beta: float,
    ref_velocity: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (unreduced loss of each sample [B], {metric tag: detached values [B]}).

    Latents and velocities are [B,C,h,w] or [B,C,T,h,w] float32. All velocities are predictions at the same noisy
    latents. sigma and reward_weight are [B] float32. With v = velocity, v_old = old_velocity, v_ref = ref_velocity, the
    weight r = reward_weight in [0, 1] (see reward_weights), and

        u = noise - clean_latents
        v+ = beta*v + (1-beta)*v_old      e+ = sigma*(u - v+)      L+ = mean((e+)^2)/mean|e+|
        v- = (1+beta)*v_old - beta*v      e- = sigma*(u - v-)      L- = mean((e-)^2)/mean|e-|

    the loss is

        l = adv_clip_max*(r*L+ + (1-r)*L-)/beta + kl_beta*mean((v - v_ref)^2)

    The denominators mean|e+| and mean|e-| have no gradient and are at least 1e-5. Only `velocity` gets a gradient.
    mask: [B,1,T,1,1], 0 on excluded frames; None if all frames count. ref_velocity must be set if and only if kl_beta >
    0. Raises ValueError for wrong shapes or dtypes.
    """
    latents = {"velocity": velocity, "old_velocity": old_velocity, "clean_latents": clean_latents, "noise": noise}
    require_latents(**latents, **({} if ref_velocity is None else {"ref_velocity": ref_velocity}))
    require_vectors(velocity, sigma=sigma, reward_weight=reward_weight)
    fraction: Tensor | float = 1.0  # fraction of the elements that the mask does not exclude
    if mask is not None:
        # Setting excluded frames to 0 makes their errors 0. Quotients of two means stay correct. Other means must be
        # divided by the fraction of elements that are not excluded.
        velocity, old_velocity, clean_latents, noise = (t * mask for t in latents.values())
        ref_velocity = None if ref_velocity is None else ref_velocity * mask
        fraction = sample_mean(mask)
    parts = fused_nft_loss(
        velocity, old_velocity, clean_latents, noise, sigma, reward_weight, beta=beta, ref_velocity=ref_velocity
    )
    policy_B = adv_clip_max * parts.policy
    stats = {
        "loss/policy": policy_B,
        "nft/loss_positive": parts.stats["loss_positive"],
        "nft/loss_negative": parts.stats["loss_negative"],
        "nft/old_deviation": parts.stats["old_deviation"] / fraction,
        "nft/old_deviation_max": parts.stats["old_deviation_max"],
        "nft/x0_norm": sample_mean(clean_latents.square()) / fraction,
        "nft/r_mean": reward_weight,
    }
    loss_B = policy_B
    if parts.kl is not None:
        kl_B = parts.kl / fraction
        loss_B = policy_B + kl_beta * kl_B  # not in place, because the metric loss/policy must not include the KL
        deviation = parts.stats["old_ref_deviation"] / fraction
        stats |= {"loss/kl": kl_B, "kl/ref": kl_B, "nft/old_ref_deviation": deviation}
    return loss_B, {tag: value.detach() for tag, value in stats.items()}


def average_streams(
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]], latents: Mapping[str, Tensor], streams: StreamWeights
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted means of the losses and metrics of all streams, and maxima of metrics that are maxima.

    loss: function of `latents` [B,N], which returns the same as `nft_loss`. It divides by the mean error, so its value
    is not a mean over elements.
    """
    parts = {name: streams.split(tensor) for name, tensor in latents.items()}
    results = [loss(**{name: part[i] for name, part in parts.items()}) for i in range(len(streams.sizes))]
    loss_B = torch.stack([w * one for w, (one, _) in zip(streams.weights, results, strict=True)]).sum(0)
    stats = {}
    for tag in results[0][1]:
        values = torch.stack([metrics[tag] for _, metrics in results])
        weights = values.new_tensor(streams.weights).view(-1, 1)
        stats[tag] = values.amax(0) if tag.endswith("_max") else (weights * values).sum(0)
    return loss_B, stats


def reward_weights(advantages: Sequence[float] | npt.NDArray[np.float64], adv_clip_max: float) -> Tensor:
    """Return the reward weights clip(A/(2*adv_clip_max) + 1/2, 0, 1) of advantages A, [B] float32 on the CPU.

    Raises ValueError for non-finite advantages.
    """
    advantage_B = np.asarray(advantages, dtype=np.float64)
    if advantage_B.ndim != 1 or not np.isfinite(advantage_B).all():
        raise ValueError(f"advantages must be finite, one per sample, got {advantages}")
    return torch.from_numpy(np.clip(advantage_B / (2 * adv_clip_max) + NEUTRAL_REWARD_WEIGHT, 0.0, 1.0)).float()


def old_decay(setting: str | DecaySchedule, num_updates: int) -> float:
    """Return the decay d of the update `old <- d*old + (1-d)*trained weights` after num_updates optimizer steps.

    setting: key of OLD_DECAY_PRESETS, or a schedule.
    """
    if isinstance(setting, str):
        flat_steps, initial, slope, maximum = OLD_DECAY_PRESETS[setting]
    else:
        flat_steps, initial, slope, maximum = setting.flat_steps, setting.initial, setting.slope, setting.max
    if num_updates < flat_steps:
        return initial
    return min(initial + (num_updates - flat_steps) * slope, maximum)


class DiffusionNft(ForwardProcess):
    Settings = NftAlgorithm
    area = "nft"
    rollout_policy = "old"
    settings: NftAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.references = ("old", "ref") if self.settings.kl_beta > 0 else ("old",)

    def credit_from_advantage(self, advantage: float) -> float:
        return float(reward_weights([advantage], self.settings.adv_clip_max)[0])

    def has_gradient(self, term: ForwardTerm, equal_policies: Set[str]) -> bool:
        """See RlAlgorithm.

        False for the reward weight 1/2 if the old policy has the trained weights and there is no KL loss.
        """
        return (
            self.settings.kl_beta > 0
            or "old" not in equal_policies
            or self.credit_from_advantage(term.advantage) != NEUTRAL_REWARD_WEIGHT
        )

    def loss(self, velocity: Tensor, batch: ForwardBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        loss = functools.partial(
            nft_loss,
            sigma=batch.sigma,
            reward_weight=batch.credit,
            beta=self.settings.beta,
            adv_clip_max=self.settings.adv_clip_max,
            kl_beta=self.settings.kl_beta,
            mask=batch.frame_mask,
        )
        latents: dict[str, Any] = {
            "velocity": velocity,
            "old_velocity": references.get("old", velocity),
            "clean_latents": batch.clean_latents,
            "noise": batch.noise,
        } | ({"ref_velocity": references["ref"]} if "ref" in references else {})
        loss_B, stats = (
            loss(**latents) if batch.stream_weights is None else average_streams(loss, latents, batch.stream_weights)
        )
        return loss_B, dict(stats)

    def policy_decays(self, step: int, num_updates: int) -> Mapping[str, float]:
        return {"old": old_decay(self.settings.old_decay, num_updates)}
