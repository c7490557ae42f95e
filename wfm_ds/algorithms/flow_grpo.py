"""Policy gradients on denoise steps: Flow-GRPO (arXiv 2505.05470), and as settings of it Flow-GRPO-Fast, MixGRPO
(2507.21802), DanceGRPO (2505.07818), GRPO-Guard (2510.22319) and Flow-DPPO (2606.11025).

A stochastic solver makes each noisy step a draw x' ~ N(mu, s^2) with mu = c_x*x + c_v*v. The rollout, by the trained
weights themselves, keeps (x, x', log-probability); the loss asks the denoiser again at x and raises or lowers the
probability of x' by the sample's advantage. Log-probabilities are means over a sample's elements, so a ratio is the
n-th root of the true one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from wfm_ds.algorithms.base import RlAlgorithm, Stats, StepSamples, shared_out
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.algorithms.plans import rollout_plan
from wfm_ds.algorithms.ratio import (
    clipped_policy_loss,
    divergence_policy_loss,
    outside_clip,
    ratio_stats,
    step_divergence,
)
from wfm_ds.algorithms.terms import trained_step_indices
from wfm_ds.errors import RecipeError
from wfm_ds.pinned import columns, on_device
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm
from wfm_ds.sampling.plan import STD, possible_steps
from wfm_ds.sampling.shapes import require_vectors, sample_mean
from wfm_ds.sampling.transition import transition_log_prob, transition_mean
from wfm_ds.seeds import derive_seed

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelFacts
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import FlowPlan, Plan
    from wfm_ds.types import Rollout

log = logging.getLogger(__name__)

START_DEVIATION = 0.1  # of the trust region, by which a policy may miss itself before the first update of an RL step


def drift(old_log_prob: Tensor, rollout_log_prob: Tensor, clip_range: float) -> Tensor:
    """|log p_old - log p_rollout| of each term [B] in units of the clip range, constant: how far the weights have moved
    since they made the sample. Both [B] float32, means over elements as everywhere here: no importance weight follows
    from them, since the true ratio is their n-th power, for n elements, and says only that a sample is all or nothing.
    """
    require_vectors(old_log_prob, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    return ((old_log_prob - rollout_log_prob).abs() / clip_range).detach()


def guarded_log_ratio(
    mean: Tensor, old_mean: Tensor, next_latents: Tensor, std: Tensor, free: Tensor | None = None
) -> Tensor:
    """GRPO-Guard's [B]: (log p - log p_old + mean((mu - mu_old)^2)/(2 s^2)) * s, the ratio's bias taken off and its
    scale evened, in the equal form mean(z*(mu - mu_old)), z = (x' - mu_old)/s, which is exactly 0 when the means agree.

    Latents and means [B, ...] of one shape, std [B]; free as in sample_mean; gradient by `mean` alone.
    """
    old = old_mean.detach()
    return sample_mean((next_latents - old) * (mean - old), free) / std


def kl_scale(kind: str, coefficients: Tensor, dt: Tensor) -> Tensor:
    """The factor of mean((v - v_ref)^2) that makes it the distance of this kind, [B] float64; dt [B] = s' - s < 0.

    The means of two steps of equal std differ by c_v*(v - v_ref): `gaussian` is c_v^2/(2 s^2), `flow_grpo` has the
    diffusion g^2 = s^2/-dt in place of s^2, `velocity` is 1. Raises ValueError for another kind.
    """
    gaussian = coefficients[:, 1].square() / (2 * coefficients[:, STD].square())
    match kind:
        case "velocity":
            return torch.ones_like(gaussian)
        case "gaussian":
            return gaussian
        case "flow_grpo":
            return gaussian * -dt
    raise ValueError(f"{kind!r} is no distance to the reference; there are velocity, gaussian and flow_grpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionTerm(Term):
    index: int  # of the denoise step
    place: int  # of its transition in the rollout
    advantage: float
    first: bool  # in the first update of its RL step: the weights are still the rollout's


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(TermBatch):
    """B stored steps."""

    next_latents: Tensor  # [B, ...]
    coefficients: Tensor  # [B,5] float64
    dt: Tensor  # [B], negative
    kl_scale: Tensor  # [B]
    advantage: Tensor  # [B]
    index: Tensor  # [B] int64, of the denoise step
    steps: tuple[int, ...]  # all that the RL step trains on
    rollout_log_prob: Tensor  # [B]
    rollout_mean: Tensor | None  # [B, ...]
    first: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """B terms under the trained weights and under the old ones: [B] float32, with gradient by `log_ratio` alone."""

    log_prob: Tensor
    old_log_prob: Tensor
    log_ratio: Tensor  # the guarded one, with the guard
    divergence: Tensor | None  # from the old policy, where the trust region is about it
    drift: Tensor | None  # of the old policy from the rollout's, in sizes of the trust region, where samples are stale
    start: Tensor | None  # divergence from the rollout before the first update, where both are known


class FlowGrpo(RlAlgorithm[TransitionTerm, TransitionBatch]):
    Settings = FlowGrpoAlgorithm
    area = "policy"
    settings: FlowGrpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        s = self.settings
        # Samples of older weights: ratios are either to the weights that sampled (`rollout`), or to those at the start
        # of the RL step, and then terms that these weights no longer make are dropped.
        self.stale = recipe.is_async and recipe.rl.rollout.max_staleness > 0
        self.drops_stale = self.stale and s.old_log_prob != "rollout"
        self.recalls_old = s.old_log_prob == "recompute" or self.drops_stale
        self.references = (*(["old"] if self.recalls_old else []), *(["ref"] if s.kl_beta > 0 else []))
        self.clip_low, self.clip_high = s.clip_ratio_low or s.clip_ratio, s.clip_ratio_high or s.clip_ratio
        self.by_divergence = s.trust_region == "divergence"
        self.compares_means = s.guard or self.by_divergence
        # A comparison in the first update needs no stored mean unless it is to be with the rollout's.
        with_rollout = s.old_log_prob == "rollout" or (
            s.old_log_prob == "auto" and s.updates_per_rollout > 1 and not self.recalls_old
        )
        self.keep_means = (self.compares_means and with_rollout) or (self.by_divergence and self.drops_stale)
        # What a step is when it is noisy does not depend on the window.
        everywhere = self._plan(self.sampling.model_copy(update={"window": None}), step=1)
        self.table, self.steps = everywhere.table, everywhere.steps
        self._require_noise()

    def _require_noise(self) -> None:
        least, sampling = self.settings.min_step_std, self.sampling
        possible = possible_steps(sampling.window, sampling.steps)
        quiet = {k: round(float(self.table[k, STD]), 4) for k in possible if self.table[k, STD] < max(least, 1e-12)}
        if quiet:
            raise RecipeError(
                f"the noise of {sampling.solver} at the denoise steps {quiet} (by step: std) is below "
                f"algorithm.min_step_std {least}: choose a sampling.window without them, more noise or fewer "
                f"sampling.steps, or lower the bound"
            )

    def plan(self, step: int) -> Plan:
        return self._plan(self.sampling, step)

    def _plan(self, sampling: SamplingRecipe, step: int) -> FlowPlan:
        return rollout_plan(
            sampling,
            self.grid,
            run_seed=self.run_seed,
            step=step,
            store=True,
            keep_means=self.keep_means,
            gaussian=self.settings.log_prob == "gaussian",
        )

    def updates(
        self, rollouts: StepSamples, advantages: Sequence[float | None], step: int
    ) -> list[list[TransitionTerm]]:
        rows_of = shared_out(len(rollouts.mine), rollouts.first, self.settings.updates_per_rollout)
        return [
            [
                term
                for row in rows
                for term in self._terms(
                    row, rollouts.mine[row], advantages[rollouts.first + row], step=step, first=u == 0
                )
            ]
            for u, rows in enumerate(rows_of)
        ]

    def _terms(
        self, row: int, rollout: Rollout, advantage: float | None, *, step: int, first: bool
    ) -> list[TransitionTerm]:
        seed = derive_seed(self.run_seed, "timesteps", step, rollout.seed)
        places = trained_step_indices(len(rollout.transitions), self.settings.timestep_fraction, seed)
        return [
            TransitionTerm(
                row=row,
                sigma=self.steps[rollout.transitions[place].index].sigma,
                weight=0.0 if advantage is None else 1.0,
                index=rollout.transitions[place].index,
                place=place,
                advantage=advantage or 0.0,
                first=first,
            )
            for place in places
        ]

    def assemble(
        self, terms: Sequence[TransitionTerm], rollouts: Sequence[Rollout], device: torch.device
    ) -> TransitionBatch:
        stored = [rollouts[t.row].transitions[t.place] for t in terms]
        indices = [t.index for t in terms]
        coefficients = self.table[indices]
        dt = [self.steps[k].sigma_next - self.steps[k].sigma for k in indices]
        scale = kl_scale(self.settings.kl_type, coefficients, torch.tensor(dt, dtype=torch.float64))
        means = [t.mean for t in stored if t.mean is not None]
        of_terms = [t.sigma for t in terms], [t.weight for t in terms], [t.advantage for t in terms]
        sigma, weight, advantage, dt_B, scale_B = columns(device, *of_terms, dt, scale.tolist())
        return TransitionBatch(
            latents=torch.stack([t.latents for t in stored]),
            sigma=sigma,
            weight=weight,
            prompts=[rollouts[t.row].prompt for t in terms],
            conditional_frames=self.conditional_frames([rollouts[t.row] for t in terms], device),
            next_latents=torch.stack([t.next_latents for t in stored]),
            coefficients=on_device(coefficients, device),
            dt=dt_B,
            kl_scale=scale_B,
            advantage=advantage,
            index=on_device(torch.tensor(indices), device),
            steps=tuple(t.index for t in rollouts[0].transitions),
            rollout_log_prob=torch.stack([t.log_prob for t in stored]),
            rollout_mean=torch.stack(means) if means else None,
            first=terms[0].first,
        )

    def loss(self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        s, compared = self.settings, self._compared(velocity, batch, references)
        policy = self._policy_loss(compared, batch.advantage)
        if s.guard and s.guard_reweight:
            policy = policy / -batch.dt
        staleness: Stats = {}
        if compared.drift is not None:
            dropped = compared.drift > s.max_drift
            policy = policy.masked_fill(dropped, 0.0)
            staleness = {"policy/drift": compared.drift, "policy/dropped_fraction": dropped.float()}
        loss, stats = policy, {"loss/policy": policy.detach()}
        if "ref" in references:
            kl = batch.kl_scale * sample_mean((velocity - references["ref"]).square(), batch.free)
            loss = policy + s.kl_beta * kl
            stats |= {"loss/kl": kl.detach(), "kl/ref": kl.detach()}
        return loss, stats | staleness | self._measured(compared, batch)

    def _policy_loss(self, compared: Compared, advantage: Tensor) -> Tensor:
        if compared.divergence is None:
            return clipped_policy_loss(compared.log_ratio, advantage, self.clip_low, self.clip_high)
        return divergence_policy_loss(compared.log_ratio, compared.divergence, advantage, self.settings.divergence)

    def _compared(self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Compared:
        log_prob, std = self._log_prob(velocity, batch), batch.coefficients[:, STD].float()
        old_log_prob = self._old_log_prob(log_prob, batch, references)
        log_ratio, divergence, moved, start = log_prob - old_log_prob, None, None, None
        if self.compares_means:
            free = batch.free
            mean = self._mean(velocity, batch)
            old_mean = self._old_mean(mean, batch, references)
            if self.settings.guard:
                log_ratio = guarded_log_ratio(mean, old_mean, batch.next_latents, std, free)
            if self.by_divergence:
                divergence = step_divergence(mean, old_mean, std, free)
                if self.drops_stale:
                    moved = step_divergence(old_mean, _stored(batch.rollout_mean), std, free) / self.settings.divergence
                if batch.first and batch.rollout_mean is not None:
                    start = step_divergence(mean, batch.rollout_mean, std, free)
        if self.drops_stale and not self.by_divergence:
            moved = drift(old_log_prob, batch.rollout_log_prob, min(self.clip_low, self.clip_high))
        return Compared(log_prob.detach(), old_log_prob.detach(), log_ratio, divergence, moved, start)

    def _log_prob(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        return transition_log_prob(velocity, batch.latents, batch.next_latents, batch.coefficients, batch.free)

    def _old(self, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Literal["own", "rollout", "recomputed"]:
        """Name the source of the probabilities under the weights of the rollout; `own`: these are still the weights."""
        if self.recalls_old:
            return "recomputed" if "old" in references else "own"
        return "own" if self.settings.old_log_prob == "auto" and batch.first else "rollout"

    def _old_log_prob(self, log_prob: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Tensor:
        match self._old(batch, references):
            case "own":
                return log_prob.detach()
            case "rollout":
                return batch.rollout_log_prob
            case "recomputed":
                return self._log_prob(references["old"], batch)

    def _old_mean(self, mean: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Tensor:
        match self._old(batch, references):
            case "own":
                return mean.detach()
            case "rollout":
                return _stored(batch.rollout_mean)
            case "recomputed":
                return self._mean(references["old"], batch)

    def _mean(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        return transition_mean(velocity, batch.latents, batch.coefficients)

    def _outside(self, compared: Compared) -> tuple[Tensor, Tensor]:
        """Tell which terms [B] have left the trust region towards a higher, and which towards a lower probability."""
        log_ratio = compared.log_ratio.detach()
        if compared.divergence is None:
            return outside_clip(log_ratio, self.clip_low, self.clip_high)
        far = compared.divergence >= self.settings.divergence
        return far & (log_ratio > 0), far & (log_ratio < 0)

    def _measured(self, compared: Compared, batch: TransitionBatch) -> Stats:
        """Measure how far the policy has moved; all detached [B]."""
        log_prob, deviation = compared.log_prob, torch.expm1(compared.log_ratio.detach())
        stats = ratio_stats(compared.log_ratio.detach(), *self._outside(compared), batch.advantage) | {
            "policy/approx_kl": 0.5 * (log_prob - compared.old_log_prob).square(),
            "policy/log_prob_mean": log_prob,
        }
        if compared.divergence is not None:
            stats |= {"policy/divergence": compared.divergence, "policy/divergence_max": compared.divergence}
        for k in batch.steps:
            stats[f"policy/step{k}/ratio_std"] = deviation, (batch.index == k).float()
        if batch.first:
            stats["policy/ratio_start_abs_dev"] = torch.expm1(log_prob - batch.rollout_log_prob).abs()
        if compared.start is not None:
            stats["policy/divergence_start"] = compared.start
        return stats

    def review(self, metrics: Mapping[str, float]) -> None:
        if self.by_divergence:
            missed, what = metrics.get("policy/divergence_start", 0.0), "policies diverge by"
            bound, region = self.settings.divergence, "algorithm.divergence"
        else:
            missed, what = metrics.get("policy/ratio_start_abs_dev", 0.0), "ratios miss 1 by"
            bound, region = min(self.clip_low, self.clip_high), "the clip range"
        if missed > START_DEVIATION * bound and not (self.stale or self.recalls_old):
            log.warning(
                "before the first update %s %.1e on average, over %.0f %% of %s %.1e: "
                "rollout and training disagree about log-probabilities; set algorithm.old_log_prob to recompute",
                what,
                missed,
                100 * START_DEVIATION,
                region,
                bound,
            )


def _stored(mean: Tensor | None) -> Tensor:
    assert mean is not None  # the plan keeps means where they are compared
    return mean
