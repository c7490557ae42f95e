"""Flow-GRPO (arXiv 2505.05470): policy gradients on denoising steps.

The settings also cover Flow-GRPO-Fast, MixGRPO (2507.21802), DanceGRPO (2505.07818), GRPO-Guard (2510.22319) and
Flow-DPPO (2606.11025). Log-probabilities are averaged over the n elements of a sample, so probability ratios are the
n-th roots of the true ratios.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import (
    LossTerm,
    LossTermBatch,
    RlAlgorithm,
    Stats,
    StepSamples,
    draw_steps,
    split_over_updates,
)
from wfm_ds.algorithms.policy_ratio import (
    divergence_policy_loss,
    outside_clip_range,
    ppo_clip_loss,
    ratio_stats,
    step_divergence,
)
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm, count_of_fraction
from wfm_ds.sampling.denoise import transition_log_prob, transition_mean
from wfm_ds.sampling.latents import sample_mean
from wfm_ds.sampling.plan import STD_COLUMN, all_trainable_steps, plan_without_window, rollout_plan
from wfm_ds.seeds import derive_seed
from wfm_ds.tensor_memory import copy_to_device, lists_to_device

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import SamplingPlan
    from wfm_ds.types import Rollout

log = logging.getLogger(__name__)

MAX_START_DEVIATION = 0.1  # fraction of the trust region; larger initial deviations are logged


def grpo_guard_log_ratio(
    mean: Tensor, old_mean: Tensor, next_latents: Tensor, std: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return GRPO-Guard's log ratio [B]: (log p - log p_old + mean((mu - mu_old)^2)/(2 s^2)) * s.

    Its expectation under the old policy is 0, and its scale does not depend on s. Equal means give exactly 0.

    mean: mu, [B, ...], with gradient. old_mean: mu_old. next_latents: x', the latents after the step. std: s, [B].
    mask: as in sample_mean.
    """
    old = old_mean.detach()
    return sample_mean((next_latents - old) * (mean - old), mask) / std


def kl_scale(kind: str, coefficients: Tensor, dt: Tensor) -> Tensor:
    """Return the factor [B] float64 that turns the velocity difference mean((v - v_ref)^2) into a KL divergence.

    The policy and the reference take the step with the same std s, and their means differ by c_v*(v - v_ref). c_v and s
    are columns of `coefficients` [B,5] (rows of FlowPlan.table). The factors by `kind` are:

        gaussian   c_v^2/(2 s^2)
        flow_grpo  c_v^2/(2 g^2) with the diffusion g^2 = s^2/-dt
        velocity   1

    dt: sigma_next - sigma, [B], negative.
    """
    gaussian = coefficients[:, 1].square() / (2 * coefficients[:, STD_COLUMN].square())
    return {"velocity": torch.ones_like(gaussian), "gaussian": gaussian, "flow_grpo": gaussian * -dt}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionTerm(LossTerm):
    denoise_step: int  # index of the denoising step
    transition_index: int  # index of its transition in the rollout
    advantage: float
    is_first_update: bool  # whether the first update of the RL step trains on it, before the weights change


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(LossTermBatch):
    """A batch of B stored denoising steps to train on."""

    next_latents: Tensor  # [B, ...]
    coefficients: Tensor  # [B,5] float64, rows of FlowPlan.table
    dt: Tensor  # [B], negative
    kl_scale: Tensor  # [B]
    advantage: Tensor  # [B]
    denoise_step: Tensor  # [B] int64, index of the denoising step
    trained_steps: tuple[int, ...]  # all denoising steps trained in the RL step
    rollout_log_prob: Tensor  # [B]
    rollout_mean: Tensor | None  # [B, ...]
    is_first_update: bool


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Compares the trained policy with the old policy on B loss terms.

    Tensors are [B] float32; only `log_ratio` has a gradient.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    log_ratio: Tensor  # GRPO-Guard's log ratio if `guard` is set
    divergence: Tensor | None  # divergence from the old policy; None unless trust_region is `divergence`
    drift: Tensor | None  # difference between rollout policy and old policy, divided by the trust region
    start_divergence: Tensor | None  # divergence from the rollout policy before the first update; None if unknown


class FlowGrpo(RlAlgorithm[TransitionTerm, TransitionBatch]):
    Settings = FlowGrpoAlgorithm
    area = "policy"
    settings: FlowGrpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        s = self.settings
        # Ratios of stale samples compare the trained weights with the weights that generated the samples (`rollout`) or
        # with the weights at the start of the RL step. In the second case, loss terms are dropped if these two sets of
        # weights predict too differently (`max_drift`).
        self.has_stale_samples = recipe.is_async and recipe.rl.rollout.max_staleness > 0
        self.drops_stale_terms = self.has_stale_samples and s.old_log_prob != "rollout"
        self.uses_old_predictions = s.old_log_prob == "recompute" or self.drops_stale_terms
        self.references = (*(["old"] if self.uses_old_predictions else []), *(["ref"] if s.kl_beta > 0 else []))
        self.clip_low, self.clip_high = s.clip_ratio_low or s.clip_ratio, s.clip_ratio_high or s.clip_ratio
        self.uses_divergence = s.trust_region == "divergence"
        self.compares_means = s.guard or self.uses_divergence
        # Store means if an update compares the trained policy with the rollout policy. With `auto`, the first update
        # does not.
        with_rollout = s.old_log_prob == "rollout" or (
            s.old_log_prob == "auto" and s.updates_per_rollout > 1 and not self.uses_old_predictions
        )
        self.keep_means = (self.compares_means and with_rollout) or (self.uses_divergence and self.drops_stale_terms)
        self.keeps_passes = s.reuse_guidance
        all_noisy = plan_without_window(self.sampling, sigmas, gaussian=s.log_prob == "gaussian")
        self.table, self.steps = all_noisy.table, all_noisy.steps
        self._check_step_noise()

    def _check_step_noise(self) -> None:
        min_std, sampling = self.settings.min_step_std, self.sampling
        possible = all_trainable_steps(sampling.window, sampling.steps)
        low_std = {
            k: round(float(self.table[k, STD_COLUMN]), 4)
            for k in possible
            if self.table[k, STD_COLUMN] < max(min_std, 1e-12)
        }
        if low_std:
            raise RecipeError(
                f"{sampling.solver}: the noise std of steps {low_std} is below algorithm.min_step_std {min_std}. "
                f"Exclude these steps with sampling.window, use more noise or fewer sampling.steps, or lower the bound"
            )

    def plan(self, step: int) -> SamplingPlan:
        plan = rollout_plan(
            self.sampling,
            self.grid,
            run_seed=self.run_seed,
            step=step,
            store_steps=True,
            keep_means=self.keep_means,
            gaussian=self.settings.log_prob == "gaussian",
        )
        return replace(plan, stream_weights=self.stream_weights)

    def updates(
        self, rollouts: StepSamples, advantages: Sequence[float | None], step: int
    ) -> list[list[TransitionTerm]]:
        parts = split_over_updates(rollouts, advantages, self.settings.updates_per_rollout)
        return [
            [term for sample in part for term in self._make_terms(*sample, step=step, is_first_update=u == 0)]
            for u, part in enumerate(parts)
        ]

    def _make_terms(
        self, row: int, rollout: Rollout, advantage: float | None, *, step: int, is_first_update: bool
    ) -> list[TransitionTerm]:
        seed = derive_seed(self.run_seed, "timesteps", step, rollout.seed)
        num_steps = len(rollout.transitions)
        count = count_of_fraction(num_steps, self.settings.timestep_fraction)
        return [
            TransitionTerm(
                row=row,
                sigma=self.steps[rollout.transitions[i].index].sigma,
                weight=0.0 if advantage is None else 1.0,
                denoise_step=rollout.transitions[i].index,
                transition_index=i,
                advantage=advantage or 0.0,
                is_first_update=is_first_update,
            )
            for i in draw_steps(num_steps, count, seed)
        ]

    def assemble(
        self, terms: Sequence[TransitionTerm], rollouts: Sequence[Rollout], device: torch.device
    ) -> TransitionBatch:
        transitions = [rollouts[t.row].transitions[t.transition_index] for t in terms]
        indices = [t.denoise_step for t in terms]
        coefficients = self.table[indices]
        dt = [self.steps[k].sigma_next - self.steps[k].sigma for k in indices]
        scale = kl_scale(self.settings.kl_type, coefficients, torch.tensor(dt, dtype=torch.float64))
        means = [t.mean for t in transitions if t.mean is not None]
        numbers = [t.sigma for t in terms], [t.weight for t in terms], [t.advantage for t in terms]
        sigma, weight, advantage, dt_B, scale_B = lists_to_device(device, *numbers, dt, scale.tolist())
        return TransitionBatch(
            latents=torch.stack([t.latents for t in transitions]),
            sigma=sigma,
            weight=weight,
            prompts=[rollouts[t.row].prompt for t in terms],
            conditioning_frames=self.conditioning_frames([rollouts[t.row] for t in terms], device),
            stream_weights=self.stream_weights,
            next_latents=torch.stack([t.next_latents for t in transitions]),
            coefficients=copy_to_device(coefficients, device),
            dt=dt_B,
            kl_scale=scale_B,
            advantage=advantage,
            denoise_step=copy_to_device(torch.tensor(indices), device),
            trained_steps=tuple(t.index for t in rollouts[0].transitions),
            rollout_log_prob=torch.stack([t.log_prob for t in transitions]),
            rollout_mean=torch.stack(means) if means else None,
            is_first_update=terms[0].is_first_update,
            passes={
                name: torch.stack([t.passes[name] for t in transitions])
                for name in (transitions[0].passes if terms[0].is_first_update else ())
            },
        )

    def loss(self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        s, comparison = self.settings, self._compare_policies(velocity, batch, references)
        policy = self._policy_loss(comparison, batch.advantage)
        if s.guard and s.guard_reweight:
            policy = policy / -batch.dt
        staleness: Stats = {}
        if comparison.drift is not None:
            dropped = comparison.drift > s.max_drift
            policy = policy.masked_fill(dropped, 0.0)
            staleness = {"policy/drift": comparison.drift, "policy/dropped_fraction": dropped.float()}
        loss, stats = policy, {"loss/policy": policy.detach()}
        if "ref" in references:
            kl = batch.kl_scale * sample_mean((velocity - references["ref"]).square(), batch.loss_mask)
            loss = policy + s.kl_beta * kl
            stats |= {"loss/kl": kl.detach(), "kl/ref": kl.detach()}
        return loss, stats | staleness | self._policy_metrics(comparison, batch)

    def _policy_loss(self, comparison: PolicyComparison, advantage: Tensor) -> Tensor:
        log_ratio, divergence = comparison.log_ratio, comparison.divergence
        if divergence is None:
            return ppo_clip_loss(log_ratio, advantage, self.clip_low, self.clip_high)
        return divergence_policy_loss(log_ratio, divergence, advantage, self.settings.divergence)

    def _compare_policies(
        self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]
    ) -> PolicyComparison:
        log_prob, std = self._log_prob(velocity, batch), batch.coefficients[:, STD_COLUMN].float()
        old_log_prob = self._choose_old(batch, references, log_prob, batch.rollout_log_prob, self._log_prob)
        log_ratio, divergence, drift, start = log_prob - old_log_prob, None, None, None
        if self.compares_means:
            mask = batch.loss_mask
            mean = self._transition_mean(velocity, batch)
            old_mean = self._choose_old(batch, references, mean, batch.rollout_mean, self._transition_mean)
            if self.settings.guard:
                log_ratio = grpo_guard_log_ratio(mean, old_mean, batch.next_latents, std, mask)
            if self.uses_divergence:
                divergence = step_divergence(mean, old_mean, std, mask)
                if self.drops_stale_terms:
                    rollout_divergence = step_divergence(old_mean, _require_stored(batch.rollout_mean), std, mask)
                    drift = rollout_divergence / self.settings.divergence
                if batch.is_first_update and batch.rollout_mean is not None:
                    start = step_divergence(mean, batch.rollout_mean, std, mask)
        if self.drops_stale_terms and not self.uses_divergence:
            distance = (old_log_prob - batch.rollout_log_prob).abs().detach()
            drift = distance / min(self.clip_low, self.clip_high)
        return PolicyComparison(log_prob.detach(), old_log_prob.detach(), log_ratio, divergence, drift, start)

    def _log_prob(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        return transition_log_prob(velocity, batch.latents, batch.next_latents, batch.coefficients, batch.loss_mask)

    def _choose_old(
        self,
        batch: TransitionBatch,
        references: Mapping[str, Tensor],
        value: Tensor,
        stored: Tensor | None,
        recompute: Callable[[Tensor, TransitionBatch], Tensor],
    ) -> Tensor:
        if self.uses_old_predictions and "old" in references:
            return recompute(references["old"], batch)
        if self.uses_old_predictions or (self.settings.old_log_prob == "auto" and batch.is_first_update):
            return value.detach()
        return _require_stored(stored)

    def _transition_mean(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        return transition_mean(velocity, batch.latents, batch.coefficients)

    def _outside_trust_region(self, comparison: PolicyComparison) -> tuple[Tensor, Tensor]:
        """Return two masks [B] of loss terms outside the trust region: with probability ratios above 1 and below 1."""
        log_ratio = comparison.log_ratio.detach()
        if comparison.divergence is None:
            return outside_clip_range(log_ratio, self.clip_low, self.clip_high)
        outside = comparison.divergence >= self.settings.divergence
        return outside & (log_ratio > 0), outside & (log_ratio < 0)

    def _policy_metrics(self, comparison: PolicyComparison, batch: TransitionBatch) -> Stats:
        log_prob, log_ratio = comparison.log_prob, comparison.log_ratio.detach()
        deviation = torch.expm1(log_ratio)
        stats = ratio_stats(log_ratio, *self._outside_trust_region(comparison), batch.advantage) | {
            "policy/approx_kl": 0.5 * (log_prob - comparison.old_log_prob).square(),
            "policy/log_prob_mean": log_prob,
        }
        if comparison.divergence is not None:
            stats |= {"policy/divergence": comparison.divergence, "policy/divergence_max": comparison.divergence}
        for k in batch.trained_steps:
            stats[f"policy/step{k}/ratio_std"] = deviation, (batch.denoise_step == k).float()
        if batch.is_first_update:
            stats["policy/ratio_start_abs_dev"] = torch.expm1(log_prob - batch.rollout_log_prob).abs()
        if comparison.start_divergence is not None:
            stats["policy/divergence_start"] = comparison.start_divergence
        return stats

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        if self.uses_divergence:
            deviation, what = metrics.get("policy/divergence_start", 0.0), "the divergence is"
            bound, region = self.settings.divergence, "algorithm.divergence"
        else:
            deviation, what = metrics.get("policy/ratio_start_abs_dev", 0.0), "|ratio - 1| is"
            bound, region = min(self.clip_low, self.clip_high), "the clip range"
        if deviation > MAX_START_DEVIATION * bound and not (self.has_stale_samples or self.uses_old_predictions):
            log.warning(
                "before the first update %s %.1e on average, more than %.0f %% of %s %.1e: "
                "rollout and training compute different log-probabilities. Set algorithm.old_log_prob: recompute",
                what,
                deviation,
                100 * MAX_START_DEVIATION,
                region,
                bound,
            )


def _require_stored(stored: Tensor | None) -> Tensor:
    assert stored is not None  # the plan stores means if they are needed
    return stored
