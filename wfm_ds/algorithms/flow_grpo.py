"""Policy gradients on denoise steps: Flow-GRPO (arXiv 2505.05470), and as settings of it Flow-GRPO-Fast, MixGRPO
(2507.21802), DanceGRPO (2505.07818) and GRPO-Guard (2510.22319).

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

from wfm_ds.algorithms.base import RlAlgorithm, Stats, StepSamples, column, shared_out
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.algorithms.plans import rollout_plan
from wfm_ds.algorithms.terms import trained_step_indices
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import FlowGrpoAlgorithm
from wfm_ds.sampling.plan import STD, possible_steps
from wfm_ds.sampling.shapes import require_vectors, sample_mean
from wfm_ds.seeds import derive_seed
from wfm_kernels import sde_log_prob

if TYPE_CHECKING:
    from wfm_ds.recipe.sampling import SamplingRecipe
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import FlowPlan, Plan
    from wfm_ds.types import Rollout

log = logging.getLogger(__name__)

MAX_CORRECTION = 2.0  # of a sample from older weights, by which its credit may grow
START_DEVIATION = 0.1  # of the clip range, by which ratios may miss 1 before the first update of an RL step


def clipped_policy_loss(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """max(-A*rho, -A*clip(rho, 1 - clip_low, 1 + clip_high)) of each term [B], rho = exp(log_ratio); all [B] float32.

    Raises ValueError for other shapes: a [B,1] would give every term the mean credit.
    """
    require_vectors(log_ratio, log_ratio=log_ratio, advantage=advantage)
    ratio = torch.exp(log_ratio)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))


def importance_weight(old_log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """min(p_old / p_rollout, MAX_CORRECTION) of each term [B], constant: what a sample of other weights counts for the
    old policy. Both [B] float32."""
    require_vectors(old_log_prob, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    return torch.exp(old_log_prob - rollout_log_prob).clamp(max=MAX_CORRECTION).detach()


def guarded_log_ratio(mean: Tensor, old_mean: Tensor, next_latents: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's [B]: (log p - log p_old + mean((mu - mu_old)^2)/(2 s^2)) * s, the ratio's bias taken off and its
    scale evened, in the equal form mean(z*(mu - mu_old)), z = (x' - mu_old)/s, which is exactly 0 when the means agree.

    Latents and means [B, ...] of one shape, std [B]; gradient by `mean` alone.
    """
    old = old_mean.detach()
    return sample_mean((next_latents - old) * (mean - old)) / std


def kl_scale(kind: str, coefficients: Tensor, dt: Tensor) -> Tensor:
    """What mean((v - v_ref)^2) is multiplied by to be the distance of this kind, [B] float64; dt [B] = s' - s < 0.

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


class FlowGrpo(RlAlgorithm[TransitionTerm, TransitionBatch]):
    Settings = FlowGrpoAlgorithm
    area = "policy"
    settings: FlowGrpoAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor) -> None:
        super().__init__(recipe, sigmas)
        s = self.settings
        # Samples of older weights: ratios are either to the weights that sampled (`rollout`), or to those at the start
        # of the RL step, and then the credit is corrected for what lies between the two.
        self.stale = recipe.is_async and recipe.rl.rollout.max_staleness > 0
        self.corrects = self.stale and s.old_log_prob != "rollout"
        self.recalls_old = s.old_log_prob == "recompute" or self.corrects
        self.references = (*(["old"] if self.recalls_old else []), *(["ref"] if s.kl_beta > 0 else []))
        self.clip_low, self.clip_high = s.clip_ratio_low or s.clip_ratio, s.clip_ratio_high or s.clip_ratio
        # A ratio of the first update needs no stored mean unless it is to be the rollout's.
        self.keep_means = s.guard and (
            s.old_log_prob == "rollout"
            or (s.old_log_prob == "auto" and s.updates_per_rollout > 1 and not self.recalls_old)
        )
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
        return TransitionBatch(
            latents=torch.stack([t.latents for t in stored]),
            sigma=column([t.sigma for t in terms], device),
            weight=column([t.weight for t in terms], device),
            prompts=[rollouts[t.row].prompt for t in terms],
            next_latents=torch.stack([t.next_latents for t in stored]),
            coefficients=coefficients.to(device),
            dt=column(dt, device),
            kl_scale=scale.float().to(device),
            advantage=column([t.advantage for t in terms], device),
            index=torch.tensor(indices, device=device),
            steps=tuple(t.index for t in rollouts[0].transitions),
            rollout_log_prob=torch.stack([t.log_prob for t in stored]),
            rollout_mean=torch.stack(means) if means else None,
            first=terms[0].first,
        )

    def loss(self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        s, log_prob = self.settings, self._log_prob(velocity, batch)
        old_log_prob = self._old_log_prob(log_prob, batch, references)
        log_ratio = self._guarded(velocity, batch, references) if s.guard else log_prob - old_log_prob
        policy = clipped_policy_loss(log_ratio, batch.advantage, self.clip_low, self.clip_high)
        if s.guard and s.guard_reweight:
            policy = policy / -batch.dt
        correction = {}
        if self.corrects:
            weight = importance_weight(old_log_prob, batch.rollout_log_prob)
            policy, correction = policy * weight, {"policy/correction": weight}
        loss, stats = policy, {"loss/policy": policy.detach()}
        if "ref" in references:
            kl = batch.kl_scale * sample_mean((velocity - references["ref"]).square())
            loss = policy + s.kl_beta * kl
            stats |= {"loss/kl": kl.detach(), "kl/ref": kl.detach()}
        measured = self._measured(log_ratio.detach(), log_prob.detach(), old_log_prob, batch)
        return loss, stats | correction | measured

    def _log_prob(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        return sde_log_prob(velocity, batch.latents, batch.next_latents, batch.coefficients)

    def _old(self, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Literal["own", "rollout", "recomputed"]:
        """Where the probabilities under the weights of the rollout come from; `own`: these are still the weights."""
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

    def _guarded(self, velocity: Tensor, batch: TransitionBatch, references: Mapping[str, Tensor]) -> Tensor:
        mean = self._mean(velocity, batch)
        match self._old(batch, references):
            case "own":
                old_mean = mean.detach()
            case "rollout":
                assert batch.rollout_mean is not None
                old_mean = batch.rollout_mean
            case "recomputed":
                old_mean = self._mean(references["old"], batch)
        return guarded_log_ratio(mean, old_mean, batch.next_latents, batch.coefficients[:, STD].float())

    def _mean(self, velocity: Tensor, batch: TransitionBatch) -> Tensor:
        c_x, c_v = (batch.coefficients[:, i].float().view(-1, *[1] * (velocity.ndim - 1)) for i in (0, 1))
        return c_x * batch.latents + c_v * velocity

    def _measured(self, log_ratio: Tensor, log_prob: Tensor, old_log_prob: Tensor, batch: TransitionBatch) -> Stats:
        """What tells how far the policy has moved; all detached [B]."""
        deviation, positive = torch.expm1(log_ratio), batch.advantage > 0
        higher, lower = deviation > self.clip_high, deviation < -self.clip_low
        stats: Stats = {
            "policy/ratio_mean": 1 + deviation,
            "policy/ratio_std": deviation,  # that of the ratio, without the digits that its 1 costs
            "policy/ratio_max_abs_dev": deviation.abs(),
            "policy/clip_fraction_higher": higher.float(),
            "policy/clip_fraction_lower": lower.float(),
            "policy/clip_fraction_active": torch.where(positive, higher, lower & (batch.advantage < 0)).float(),
            "policy/approx_kl": 0.5 * (log_prob - old_log_prob).square(),
            "policy/log_prob_mean": log_prob,
        }
        for k in batch.steps:
            stats[f"policy/step{k}/ratio_std"] = deviation, (batch.index == k).float()
        if batch.first:
            stats["policy/ratio_start_abs_dev"] = torch.expm1(log_prob - batch.rollout_log_prob).abs()
        return stats

    def review(self, metrics: Mapping[str, float]) -> None:
        deviation, bound = metrics.get("policy/ratio_start_abs_dev", 0.0), min(self.clip_low, self.clip_high)
        if deviation > START_DEVIATION * bound and not self.stale:
            log.warning(
                "before the first update ratios miss 1 by %.1e on average, over %.0f %% of the clip range %.1e: "
                "rollout and training disagree about log-probabilities; set algorithm.old_log_prob to recompute",
                deviation,
                100 * START_DEVIATION,
                bound,
            )
