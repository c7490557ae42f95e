"""DDRL (arXiv 2512.04332): policy gradients on EDM rollouts with churn, regularized by a diffusion loss on data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wfm_ds.algorithms.base import LossTerm, LossTermBatch, RlAlgorithm, Stats, StepSamples
from wfm_ds.algorithms.ddrl_losses import data_loss, draw_data_sigma, log_ratio, reference_kl
from wfm_ds.algorithms.policy_ratio import outside_clip_range, ppo_clip_loss, ratio_stats
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms import DdrlAlgorithm
from wfm_ds.sampling.denoise import step_noise_seeds
from wfm_ds.sampling.edm import Churn, EdmPlan, make_edm_plan
from wfm_ds.sampling.latents import add_noise, draw_cpu_normal, draw_device_normal, noisy_latents
from wfm_ds.seeds import derive_seed
from wfm_ds.tensor_memory import copy_to_device, lists_to_device
from wfm_ds.types import ConditioningFrames

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.types import Rollout

RANDOM_STEP = -1  # in algorithm.train_on: train on one additional random step
MIN_STD = 0.05  # smallest noise std of a trained step if a Gaussian ratio compares two different policies


@dataclass(frozen=True, slots=True, kw_only=True)
class DdrlTerm(LossTerm):
    index: int  # index of the denoising step
    advantage: float
    data: DataNoise | None  # noise of the additional diffusion loss on data


@dataclass(frozen=True, slots=True)
class DataNoise:
    sigma: float
    seed: int
    is_rollout_noise: bool  # whether `seed` is the seed of the rollout's initial noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """The transitions from B rollout states to the next states."""

    noise: Tensor  # [B, ...]
    gain: Tensor  # [B], d(mean)/d(velocity)/std
    std: Tensor  # [B]
    advantage: Tensor  # [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTargets:
    """The clean latents and noise of the D data samples of a batch, for the data loss."""

    term_indices: Tensor  # [D] int64, index of the loss term of each data sample
    clean_latents: Tensor  # [D, ...]
    noise: Tensor  # [D, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DdrlBatch(LossTermBatch):
    """B loss terms, D of them with a data sample.

    The first B rows of `latents`, `sigma`, `prompts` and `conditioning_frames` are rollout states. The next D rows are
    noisy data samples. If `is_split` is true, states and data samples have separate forward passes.
    """

    transitions: Transitions | None  # None if the batch has only data samples
    data: DataTargets | None  # None if the batch has only states, or if the run has no data loss
    is_split: bool

    @property
    def num_states(self) -> int:
        return len(self.weight) if self.transitions else 0

    def parts(self) -> Sequence[DdrlBatch]:
        if not self.is_split:
            return [self]
        states, data = slice(self.num_states), slice(self.num_states, None)
        return [self._make_part(states, self.transitions, None), self._make_part(data, None, self.data)]

    def _make_part(self, rows: slice, transitions: Transitions | None, data: DataTargets | None) -> DdrlBatch:
        frames = self.conditioning_frames
        return dataclasses.replace(
            self,
            latents=self.latents[rows],
            sigma=self.sigma[rows],
            prompts=self.prompts[rows],
            conditioning_frames=frames and ConditioningFrames(frames.latents[rows], frames.counts[rows]),
            transitions=transitions,
            data=data,
            is_split=False,
        )

    def reference_inputs(self) -> LossTermBatch:
        return self._make_part(slice(self.num_states), self.transitions, None)

    def row_mask(self, rows: slice) -> Tensor | None:
        mask = self.loss_mask
        return None if mask is None else mask[rows]


class Ddrl(RlAlgorithm[DdrlTerm, DdrlBatch]):
    Settings = DdrlAlgorithm
    area = "ddrl"
    settings: DdrlAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.on_policy = recipe.rl.rollout.policy != "reference"
        self.reference_policy = self.settings.reference_policy
        self.separates_data = self.settings.data_forward == "separate"
        self.rollout_policy = "train" if self.on_policy else self.reference_policy
        self.references = tuple(self.settings.list_policies(recipe.rl.rollout))
        if self.settings.exp_reward:
            baseline = self.settings.exp_reward_baseline
            self.advantage_transform = lambda advantages: baseline - np.exp(-advantages)
        self.edm_plan = self._make_plan(())
        self._check_step_noise()

    def _make_plan(self, stored: Sequence[int]) -> EdmPlan:
        sampling = self.sampling
        churn = Churn.from_settings(sampling.steps, **sampling.churn_settings)
        try:
            return make_edm_plan(sampling.solver, sampling.steps, churn, stored_steps=stored)
        except ValueError as error:
            raise RecipeError(f"sampling: {error}") from error

    def _check_step_noise(self) -> None:
        train_on, stochastic = self.settings.train_on, self.edm_plan.trainable_steps()
        deterministic = sorted(set(train_on) - {RANDOM_STEP} - set(stochastic))
        if deterministic:
            raise RecipeError(
                f"algorithm.train_on: steps {deterministic} add no noise, only {stochastic} do. Change train_on, "
                "sampling.s_churn, sampling.s_t_min or sampling.s_t_max"
            )
        if RANDOM_STEP in train_on and not set(stochastic) - set(train_on):
            raise RecipeError(
                f"algorithm.train_on: -1 adds a random one of the stochastic steps {stochastic}, but {train_on} lists "
                "all of them already. Remove -1"
            )
        trained = stochastic if RANDOM_STEP in train_on else train_on
        low_noise = [k for k in trained if self.edm_plan.steps[k].std < MIN_STD]
        if low_noise and self.settings.ratio_norm == "gaussian" and not self.on_policy:
            raise RecipeError(
                f"algorithm.ratio_norm gaussian: the noise std at steps {low_noise} is below {MIN_STD}, too low to "
                "compare two policies. Remove them from algorithm.train_on, or set rollout.policy: current"
            )

    def training_steps(self, step: int) -> list[int]:
        """Return the denoising steps that RL step `step` trains on, ascending. All ranks get the same steps."""
        steps = [k for k in self.settings.train_on if k != RANDOM_STEP]
        if len(steps) < len(self.settings.train_on):
            others = [k for k in self.edm_plan.trainable_steps() if k not in steps]
            steps.append(others[derive_seed(self.run_seed, "extra_step", step) % len(others)])
        return sorted(steps)

    def plan(self, step: int) -> EdmPlan:
        return self._make_plan(self.training_steps(step))

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[DdrlTerm]]:
        trained = self.training_steps(step)
        with_data = self._steps_with_data(trained)
        return [
            [
                DdrlTerm(
                    row=row,
                    sigma=self.edm_plan.steps[k].sigma,
                    weight=0.0 if advantages[rollouts.first_index + row] is None else 1.0,
                    num_parts=2 if k in with_data and self.separates_data else 1,
                    index=k,
                    advantage=advantages[rollouts.first_index + row] or 0.0,
                    data=self._data_noise(rollout, k, step) if k in with_data else None,
                )
                for row, rollout in enumerate(rollouts.local_rollouts)
                for k in trained
            ]
        ]

    def _steps_with_data(self, trained: Sequence[int]) -> Sequence[int]:
        if self.settings.data_beta == 0:
            return []
        return trained[:1] if self.settings.data_on_first_only else trained

    def _data_noise(self, rollout: Rollout, denoise_step: int, step: int) -> DataNoise:
        if self.settings.use_rl_sigma_and_noise:
            return DataNoise(self.edm_plan.steps[denoise_step].sigma, rollout.noise_seed, is_rollout_noise=True)
        key = (step, rollout.seed, denoise_step)
        return DataNoise(
            draw_data_sigma(self.run_seed, *key, video=rollout.clean_latents.ndim == 4),
            derive_seed(self.run_seed, "data_noise", *key),
            is_rollout_noise=False,
        )

    def assemble(self, terms: Sequence[DdrlTerm], rollouts: Sequence[Rollout], device: torch.device) -> DdrlBatch:
        samples = [rollouts[t.row] for t in terms]
        steps = [self.edm_plan.steps[t.index] for t in terms]
        states = torch.stack([sample.states[t.index] for sample, t in zip(samples, terms, strict=True)])
        seeds = [step_noise_seeds([sample.seed], t.index) for sample, t in zip(samples, terms, strict=True)]
        data_samples, noisy, data_sigma, targets = make_noisy_data(terms, samples, states)
        sigma, weight, advantage, gain, std = lists_to_device(
            device,
            [t.sigma for t in terms],
            [t.weight for t in terms],
            [t.advantage for t in terms],
            [step.gain for step in steps],
            [step.std for step in steps],
        )
        return DdrlBatch(
            latents=torch.cat([states, noisy]),
            sigma=torch.cat([sigma, data_sigma]),
            weight=weight,
            prompts=[sample.prompt for sample in [*samples, *data_samples]],
            conditioning_frames=self.conditioning_frames([*samples, *data_samples], device),
            transitions=Transitions(
                noise=draw_device_normal(copy_to_device(torch.cat(seeds), device), states),
                gain=gain,
                std=std,
                advantage=advantage,
            ),
            data=None if self.settings.data_beta == 0 else targets,
            is_split=any(t.num_parts > 1 for t in terms),
        )

    def loss(self, velocity: Tensor, batch: DdrlBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        s, count = self.settings, batch.num_states
        loss = torch.zeros_like(batch.weight)
        stats: Stats = {}
        if batch.transitions is not None:
            mask = batch.row_mask(slice(count))
            loss, stats = self._policy_loss(velocity[:count], batch.transitions, references, mask)
        if batch.data is not None:
            data, has_data = self._data_loss(velocity[count:], batch, batch.data)
            loss = loss + s.data_beta * data
            stats |= {"loss/data": (data.detach(), has_data)}
        return s.loss_scale * loss, {"loss/total": loss.detach(), **stats}

    def _policy_loss(
        self, velocity: Tensor, transitions: Transitions, references: Mapping[str, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Stats]:
        s, gain, std, advantage = self.settings, transitions.gain, transitions.std, transitions.advantage
        reference = references.get(self.reference_policy, velocity.detach())
        old = velocity.detach() if self.on_policy else reference
        log_rho = log_ratio(velocity, old, transitions.noise, gain, std, norm=s.ratio_norm, mask=mask)
        loss = ppo_clip_loss(log_rho, advantage, s.clip_ratio, s.clip_ratio)
        stats: Stats = {"loss/policy": loss.detach()}
        if not self.on_policy:  # otherwise the ratio is 1 before the only update of the step
            outside = outside_clip_range(log_rho.detach(), s.clip_ratio, s.clip_ratio)
            stats |= {"ddrl/log_ratio_abs_mean": log_rho.detach().abs()}
            stats |= ratio_stats(log_rho.detach(), *outside, advantage)
        if s.kl_beta > 0:
            kl = reference_kl(velocity, reference, gain, std, norm=s.ratio_norm, mask=mask)
            loss = loss + s.kl_beta * kl
            stats |= {"loss/kl": kl.detach()}
        return loss, stats

    def _data_loss(self, velocity: Tensor, batch: DdrlBatch, data: DataTargets) -> tuple[Tensor, Tensor]:
        """Return (data loss [B], mask [B] of the loss terms that have a data sample).

        velocity: prediction at the D noisy data samples, [D, ...].
        """
        zeros = torch.zeros_like(batch.weight)
        if len(velocity) == 0:
            return zeros, zeros
        rows = slice(batch.num_states, None)
        losses = data_loss(velocity, data.clean_latents, data.noise, batch.sigma[rows], batch.row_mask(rows))
        return zeros.index_add(0, data.term_indices, losses), zeros.index_fill(0, data.term_indices, 1.0)

    def policy_decays(self, step: int, num_updates: int) -> Mapping[str, float]:
        every = self.settings.update_ref_every
        return {self.reference_policy: 0.0} if every and step % every == 0 else {}


def make_noisy_data(
    terms: Sequence[DdrlTerm], samples: Sequence[Rollout], states: Tensor
) -> tuple[Sequence[Rollout], Tensor, Tensor, DataTargets]:
    """Add noise to the data samples of these loss terms. Terms without a data sample are skipped.

    samples, states: the rollout and the rollout state of each term. Returns the D samples, their noisy latents
    [D, ...], their noise levels [D], and the targets.
    """
    chosen = [(i, t.data, samples[i]) for i, t in enumerate(terms) if t.data is not None]
    indices = copy_to_device(torch.tensor([i for i, _, _ in chosen], dtype=torch.int64), states.device)
    if not chosen:
        none = states[:0]
        return [], none, states.new_empty(0), DataTargets(term_indices=indices, clean_latents=none, noise=none)
    clean = torch.stack([sample.data_latents for _, _, sample in chosen if sample.data_latents is not None])
    seeds = [data.seed for _, data, _ in chosen]
    (sigma,) = lists_to_device(states.device, [data.sigma for _, data, _ in chosen])
    if chosen[0][1].is_rollout_noise:  # a setting of the recipe, so it is equal for all terms
        noise = draw_cpu_normal(seeds, clean.shape[1:], states.device)
        latents = noisy_latents(clean, noise, sigma)
    else:
        latents, noise = add_noise(clean, sigma, seeds)
    targets = DataTargets(term_indices=indices, clean_latents=clean, noise=noise)
    return [sample for _, _, sample in chosen], latents, sigma, targets
