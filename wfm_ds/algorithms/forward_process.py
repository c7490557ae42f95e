"""Base class of RL algorithms on the forward process: their loss adds noise to the clean latents of a rollout.

Rollouts may use any solver and noise levels. Subclasses define `settings` and `loss`, and optionally
`credit_from_advantage`, `references` and `policy_decays`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import (
    LossTerm,
    LossTermBatch,
    RlAlgorithm,
    StepSamples,
    draw_steps,
    draw_stratified_sigmas,
    split_over_updates,
)
from wfm_ds.recipe.algorithms import ForwardProcessSettings
from wfm_ds.sampling.latents import add_noise, require_latents, sample_mean
from wfm_ds.sampling.plan import rollout_plan
from wfm_ds.seeds import derive_seed
from wfm_ds.tensor_memory import lists_to_device

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import FlowPlan, SamplingPlan
    from wfm_ds.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTerm(LossTerm):
    """One (sample, noise level) pair to train on. Equal noise seeds give equal noise."""

    noise_seed: int
    advantage: float  # 0 for a sample without an advantage (its weight is 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(LossTermBatch):
    """B loss terms: clean latents [B, ...], noise [B, ...] and credit [B], a function of the advantage."""

    clean_latents: Tensor
    noise: Tensor
    credit: Tensor  # from ForwardProcess.credit_from_advantage

    def velocity_errors(self, velocity: Tensor) -> Tensor:
        """Return mean((velocity - (noise - clean_latents))^2) of each sample, [B]."""
        require_latents(velocity=velocity, clean=self.clean_latents, noise=self.noise)
        return sample_mean((velocity - (self.noise - self.clean_latents)).square(), self.loss_mask)


class ForwardProcess(RlAlgorithm[ForwardTerm, ForwardBatch]):
    base_settings = ForwardProcessSettings
    settings: ForwardProcessSettings

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.sigmas: list[float] = sigmas[:-1].tolist()
        self.num_levels = self.settings.terms_per_sample(recipe.sampling)
        self.num_available_levels = self.settings.num_grid_levels(len(self.sigmas))
        self.has_regularizer = self.settings.has_regularizer
        self.shift = self.settings.flow_shift
        if self.settings.levels == "stratified" and self.shift is None and model is not None:
            self.shift = model.flow_shift(self.sampling)

    @functools.cached_property
    def _fixed_plan(self) -> FlowPlan | None:
        return None if self.sampling.is_stochastic else rollout_plan(self.sampling, self.grid)

    def plan(self, step: int) -> SamplingPlan:
        return self._fixed_plan or rollout_plan(self.sampling, self.grid, run_seed=self.run_seed, step=step)

    def credit_from_advantage(self, advantage: float) -> float:
        """Return the coefficient of the loss (`batch.credit`) for this advantage: by default, the advantage itself."""
        return advantage

    def has_gradient(self, term: ForwardTerm, equal_policies: Set[str]) -> bool:
        return term.advantage != 0 or self.has_regularizer

    def noise_key(self, rollout: Rollout) -> tuple[int | str, ...]:
        """Return the key that seeds a sample's noise levels and noise. Samples with equal keys share both."""
        return (rollout.seed,)

    def noise_levels(self, step: int, *key: int | str) -> list[tuple[int, float]]:
        """Return (index, sigma) for each noise level that a sample is trained on in RL step `step`, in training order.

        key: seed of the random choice of noise levels, in addition to the run seed and `step`. With `levels: grid`, the
        index is the rollout's denoising step at this sigma. With `levels: stratified`, it is the position in the list.
        """
        if self.settings.levels == "grid":
            seed = derive_seed(self.run_seed, "timesteps", step, *key)
            return [(k, self.sigmas[k]) for k in draw_steps(self.num_available_levels, self.num_levels, seed)]
        assert self.shift is not None, "built without a model: the timestep shift is unknown"
        return list(enumerate(draw_stratified_sigmas(self.num_levels, self.shift, self.run_seed, step, *key)))

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[ForwardTerm]]:
        parts = split_over_updates(rollouts, advantages, self.settings.updates_per_rollout)
        return [[term for sample in part for term in self._make_terms(*sample, step)] for part in parts]

    def _make_terms(self, row: int, rollout: Rollout, advantage: float | None, step: int) -> list[ForwardTerm]:
        key = self.noise_key(rollout)
        return [
            ForwardTerm(
                row=row,
                sigma=sigma,
                noise_seed=derive_seed(self.run_seed, "train_noise", step, *key, k),
                advantage=0.0 if advantage is None else advantage,
                weight=0.0 if advantage is None else 1.0,
            )
            for k, sigma in self.noise_levels(step, *key)
        ]

    def assemble(self, terms: Sequence[ForwardTerm], rollouts: Sequence[Rollout], device: torch.device) -> ForwardBatch:
        samples = [rollouts[t.row] for t in terms]
        clean = torch.stack([s.clean_latents for s in samples])
        numbers = (
            [t.sigma for t in terms],
            [t.weight for t in terms],
            [self.credit_from_advantage(t.advantage) for t in terms],
        )
        sigma, weight, credit = lists_to_device(device, *numbers)
        noisy, noise = add_noise(clean, sigma, [t.noise_seed for t in terms])
        return ForwardBatch(
            latents=noisy,
            sigma=sigma,
            weight=weight,
            prompts=[s.prompt for s in samples],
            conditioning_frames=self.conditioning_frames(samples, device),
            stream_weights=self.stream_weights,
            clean_latents=clean,
            noise=noise,
            credit=credit,
        )
