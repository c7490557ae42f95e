"""DDRL (arXiv 2512.04332): policy gradients on churned EDM rollouts, held to the data instead of to a reference.

A rollout keeps the latents that the denoiser saw at the trained steps, and nothing else: the transition from there is
Gaussian with a mean affine in the velocity, its noise follows from the sample's seed, and so all that the policy term
needs besides are two numbers of the plan. Terms of the loss: ddrl_terms.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import Advantages, Rewards, step_advantages
from wfm_ds.algorithms.base import RlAlgorithm, Stats, StepSamples
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.algorithms.ddrl_terms import data_loss, data_sigma, log_ratio, reference_kl
from wfm_ds.algorithms.ratio import clipped_policy_loss
from wfm_ds.errors import RecipeError
from wfm_ds.pinned import columns, on_device
from wfm_ds.recipe.algorithms import DdrlAlgorithm
from wfm_ds.sampling.denoise import step_seeds
from wfm_ds.sampling.edm import Churn, EdmPlan, edm_plan
from wfm_ds.sampling.noise import drawn_normal, noised, noisy_latents, seeded_normal
from wfm_ds.seeds import derive_seed
from wfm_ds.types import ConditionalFrames

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelFacts
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.types import Rollout

RANDOM_STEP = -1  # in train_on
MIN_STD = 0.05  # of a step that a Gaussian ratio of two different policies may be trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class DdrlTerm(Term):
    index: int  # of the denoise step
    advantage: float
    data: DataNoise | None  # the diffusion loss that goes with it


@dataclass(frozen=True, slots=True)
class DataNoise:
    """The noise on a term's data."""

    sigma: float
    seed: int
    of_rollout: bool  # what the rollout's own initial noise was drawn from


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """The transitions from the B rollout states."""

    noise: Tensor  # [B, ...]
    gain: Tensor  # [B], d(mean)/d(velocity)/std
    std: Tensor  # [B]
    advantage: Tensor  # [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanData:
    """The clean data and the noise behind the D noisy ones."""

    clean: Tensor  # [D, ...]
    noise: Tensor  # [D, ...]
    terms: Tensor  # [D] int64, the indices of their terms


@dataclass(frozen=True, slots=True, kw_only=True)
class DdrlBatch(TermBatch):
    """B terms, of which D have data. The denoiser is asked about B + D latents in one forward: `latents`, `sigma`,
    `prompts` and `conditional_frames` hold the D noisy data behind the B rollout states. A divided batch has two parts
    instead, the states and the data."""

    transitions: Transitions | None  # None in the part that is the data
    data: CleanData | None  # None in the part that is the states, and where data does not train
    divided: bool

    @property
    def num_states(self) -> int:
        return len(self.weight) if self.transitions else 0

    def parts(self) -> Sequence[DdrlBatch]:
        if not self.divided:
            return [self]
        states, data = slice(self.num_states), slice(self.num_states, None)
        return [
            dataclasses.replace(self, divided=False, data=None, **self._rows(states)),
            dataclasses.replace(self, divided=False, transitions=None, **self._rows(data)),
        ]

    def for_references(self) -> TermBatch:
        """Return the states: no other policy is asked about the data."""
        return TermBatch(weight=self.weight, **self._rows(slice(self.num_states)))

    def _rows(self, rows: slice) -> dict[str, Any]:
        """These rows of the forward."""
        frames = self.conditional_frames
        return {
            "latents": self.latents[rows],
            "sigma": self.sigma[rows],
            "prompts": self.prompts[rows],
            "conditional_frames": frames and ConditionalFrames(frames.latents[rows], frames.counts[rows]),
        }

    def free_of(self, rows: slice) -> Tensor | None:
        """`free` of these rows of the forward."""
        free = self.free
        return None if free is None else free[rows]


class Ddrl(RlAlgorithm[DdrlTerm, DdrlBatch]):
    Settings = DdrlAlgorithm
    area = "ddrl"
    settings: DdrlAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> None:
        """The grid of the family counts for nothing: EDM solvers have their own."""
        super().__init__(recipe, sigmas, model)
        self.on_policy = recipe.rl.rollout.policy != "reference"
        self.reference = self.settings.reference
        self.separate = self.settings.data_forward == "separate"
        self.rollout_policy = "train" if self.on_policy else self.reference
        self.references = tuple(self.settings.policies(recipe.rl.rollout))
        self.edm = self._plan(())
        self._require_noise()

    def _plan(self, stored: Sequence[int]) -> EdmPlan:
        sampling = self.sampling
        churn = Churn.of_run(sampling.steps, **sampling.churn)
        try:
            return edm_plan(sampling.solver, sampling.steps, churn, stored=stored)
        except ValueError as error:
            raise RecipeError(f"sampling: {error}") from error

    def _require_noise(self) -> None:
        train_on, possible = self.settings.train_on, self.edm.trainable()
        silent = sorted(set(train_on) - {RANDOM_STEP} - set(possible))
        if silent:
            raise RecipeError(
                f"algorithm.train_on: no noise follows the denoise steps {silent}, only {possible}: change it, "
                "sampling.s_churn, sampling.s_t_min or sampling.s_t_max"
            )
        if RANDOM_STEP in train_on and not set(possible) - set(train_on):
            raise RecipeError(
                f"algorithm.train_on: -1 is one more of the steps {possible} that noise follows, but {train_on} names "
                "all of them: remove it"
            )
        quiet = [k for k in (possible if RANDOM_STEP in train_on else train_on) if self.edm.steps[k].std < MIN_STD]
        if quiet and self.settings.ratio_norm == "gaussian" and not self.on_policy:
            raise RecipeError(
                f"algorithm.ratio_norm gaussian cannot compare two policies at the denoise steps {quiet}, whose noise "
                f"is below {MIN_STD}: take them out of algorithm.train_on, or set rollout.policy: current"
            )

    def trained_steps(self, step: int) -> list[int]:
        """The denoise steps that RL step `step` trains on, ascending; the same on every rank."""
        named = [k for k in self.settings.train_on if k != RANDOM_STEP]
        if len(named) < len(self.settings.train_on):
            others = [k for k in self.edm.trainable() if k not in named]
            named.append(others[derive_seed(self.run_seed, "extra_step", step) % len(others)])
        return sorted(named)

    def plan(self, step: int) -> EdmPlan:
        return self._plan(self.trained_steps(step))

    def advantages(self, rewards: Rewards, groups: Sequence[str]) -> Advantages:
        s = self.settings
        if not s.exp_reward:
            return step_advantages(rewards, groups, s)
        return step_advantages(rewards, groups, s, transform=lambda a: s.exp_reward_baseline - np.exp(-a))

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[DdrlTerm]]:
        trained = self.trained_steps(step)
        with_data = self._steps_with_data(trained)
        return [
            [
                DdrlTerm(
                    row=row,
                    sigma=self.edm.steps[k].sigma,
                    weight=0.0 if advantages[rollouts.first + row] is None else 1.0,
                    num_parts=2 if k in with_data and self.separate else 1,
                    index=k,
                    advantage=advantages[rollouts.first + row] or 0.0,
                    data=self._data_noise(rollout, k, step) if k in with_data else None,
                )
                for row, rollout in enumerate(rollouts.mine)
                for k in trained
            ]
        ]

    def _steps_with_data(self, trained: Sequence[int]) -> Sequence[int]:
        if self.settings.data_beta == 0:
            return []
        return trained[:1] if self.settings.data_on_first_only else trained

    def _data_noise(self, rollout: Rollout, k: int, step: int) -> DataNoise:
        if self.settings.use_rl_sigma_and_noise:
            return DataNoise(self.edm.steps[k].sigma, rollout.noise_seed, of_rollout=True)
        key = (step, rollout.seed, k)
        return DataNoise(
            data_sigma(self.run_seed, *key, video=rollout.clean_latents.ndim == 4),
            derive_seed(self.run_seed, "data_noise", *key),
            of_rollout=False,
        )

    def assemble(self, terms: Sequence[DdrlTerm], rollouts: Sequence[Rollout], device: torch.device) -> DdrlBatch:
        samples = [rollouts[t.row] for t in terms]
        steps = [self.edm.steps[t.index] for t in terms]
        states = torch.stack([sample.states[t.index] for sample, t in zip(samples, terms, strict=True)])
        seeds = [step_seeds([sample.seed], t.index) for sample, t in zip(samples, terms, strict=True)]
        seen = noised_data(terms, samples, states)
        of_terms = [t.sigma for t in terms], [t.weight for t in terms], [t.advantage for t in terms]
        of_steps = [step.gain for step in steps], [step.std for step in steps]
        sigma, weight, advantage, gain, std = columns(device, *of_terms, *of_steps)
        return DdrlBatch(
            latents=torch.cat([states, seen.latents]),
            sigma=torch.cat([sigma, seen.sigma]),
            weight=weight,
            prompts=[sample.prompt for sample in [*samples, *seen.samples]],
            conditional_frames=self.conditional_frames([*samples, *seen.samples], device),
            transitions=Transitions(
                noise=drawn_normal(on_device(torch.cat(seeds), device), states),
                gain=gain,
                std=std,
                advantage=advantage,
            ),
            data=self._clean_data(seen, device),
            divided=any(t.num_parts > 1 for t in terms),
        )

    def _clean_data(self, seen: NoisedData, device: torch.device) -> CleanData | None:
        if self.settings.data_beta == 0:
            return None
        terms = on_device(torch.tensor(seen.rows, dtype=torch.int64), device)
        return CleanData(clean=seen.clean, noise=seen.noise, terms=terms)

    def loss(self, velocity: Tensor, batch: DdrlBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        s, count = self.settings, batch.num_states
        loss = torch.zeros_like(batch.weight)
        stats: Stats = {}
        if batch.transitions is not None:
            loss, stats = self._policy_loss(
                velocity[:count], batch.transitions, references, batch.free_of(slice(count))
            )
        if batch.data is not None:
            data, has_data = self._data_loss(velocity[count:], batch, batch.data)
            loss = loss + s.data_beta * data
            stats |= {"loss/data": (data.detach(), has_data)}
        return s.loss_scale * loss, {"loss/total": loss.detach(), **stats}

    def _policy_loss(
        self, velocity: Tensor, transitions: Transitions, references: Mapping[str, Tensor], free: Tensor | None
    ) -> tuple[Tensor, Stats]:
        """The part of the rollout states in each term [B], with its distance to the reference."""
        s, of = self.settings, transitions
        reference = references.get(self.reference, velocity.detach())
        old = velocity.detach() if self.on_policy else reference
        log_rho = log_ratio(velocity, old, of.noise, of.gain, of.std, norm=s.ratio_norm, free=free)
        loss = clipped_policy_loss(log_rho, of.advantage, s.clip_ratio, s.clip_ratio)
        stats = {"loss/policy": loss.detach(), **self._measured(log_rho.detach(), of.advantage)}
        if s.kl_beta > 0:
            kl = reference_kl(velocity, reference, of.gain, of.std, norm=s.ratio_norm, free=free)
            loss = loss + s.kl_beta * kl
            stats |= {"loss/kl": kl.detach()}
        return loss, stats

    def _data_loss(self, velocity: Tensor, batch: DdrlBatch, data: CleanData) -> tuple[Tensor, Tensor]:
        """The data's part of each term [B], 0 where it has none, and whether it has any. velocity: of the D data."""
        of_terms = torch.zeros_like(batch.weight)
        if len(velocity) == 0:
            return of_terms, of_terms
        rows = slice(batch.num_states, None)
        losses = data_loss(velocity, data.clean, data.noise, batch.sigma[rows], batch.free_of(rows))
        return of_terms.index_add(0, data.terms, losses), of_terms.index_fill(0, data.terms, 1.0)

    def _measured(self, log_rho: Tensor, advantage: Tensor) -> Stats:
        """Measure how far the policy is from the one that rolled out; detached [B]."""
        if self.on_policy:  # before the only update of the step the ratio is 1
            return {}
        deviation, positive = torch.expm1(log_rho), advantage > 0
        higher, lower = deviation > self.settings.clip_ratio, deviation < -self.settings.clip_ratio
        return {
            "ddrl/log_ratio_abs_mean": log_rho.abs(),
            "policy/ratio_mean": 1 + deviation,
            "policy/ratio_std": deviation,
            "policy/ratio_max_abs_dev": deviation.abs(),
            "policy/clip_fraction_higher": higher.float(),
            "policy/clip_fraction_lower": lower.float(),
            "policy/clip_fraction_active": torch.where(positive, higher, lower & (advantage < 0)).float(),
        }

    def moves(self, step: int, num_updates: int) -> Mapping[str, float]:
        every = self.settings.update_ref_every
        return {self.reference: 0.0} if every and step % every == 0 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedData:
    """The data of D terms."""

    samples: Sequence[Rollout]
    rows: Sequence[int]  # of the terms
    clean: Tensor  # [D, ...]
    noise: Tensor  # [D, ...]
    latents: Tensor  # [D, ...], noisy
    sigma: Tensor  # [D]


def noised_data(terms: Sequence[DdrlTerm], samples: Sequence[Rollout], like: Tensor) -> NoisedData:
    """The data of those terms that have any; `like` has its dtype, device and, from the second dimension on, shape."""
    chosen = [(i, t.data, samples[i]) for i, t in enumerate(terms) if t.data is not None]
    if not chosen:
        none = like[:0]
        return NoisedData(samples=[], rows=[], clean=none, noise=none, latents=none, sigma=like.new_empty(0))
    clean = torch.stack([sample.data for _, _, sample in chosen if sample.data is not None])
    seeds = [how.seed for _, how, _ in chosen]
    (sigma,) = columns(like.device, [how.sigma for _, how, _ in chosen])
    if chosen[0][1].of_rollout:  # a setting of the recipe: so are all
        noise = seeded_normal(seeds, clean.shape[1:], like.device)
        latents = noisy_latents(clean, noise, sigma)
    else:
        latents, noise = noised(clean, sigma, seeds)
    return NoisedData(
        samples=[sample for _, _, sample in chosen],
        rows=[i for i, _, _ in chosen],
        clean=clean,
        noise=noise,
        latents=latents,
        sigma=sigma,
    )
