"""Base class of RL algorithms on the forward process: their loss re-noises the clean latents of a rollout.

The solver and the noise levels of the rollout do not matter. Subclasses define `settings` and `loss`, and optionally
`credit_from_advantage`, `references` and `policy_decays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import RlAlgorithm, StepSamples, shared_out
from wfm_ds.algorithms.batch import Term, TermBatch
from wfm_ds.algorithms.plans import rollout_plan
from wfm_ds.algorithms.terms import drawn_steps, stratified_sigmas
from wfm_ds.pinned import columns
from wfm_ds.recipe.algorithms import ForwardProcessSettings
from wfm_ds.sampling.noise import noised
from wfm_ds.seeds import derive_seed

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelFacts
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import Plan
    from wfm_ds.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTerm(Term):
    """A sample at a noise level. Equal noise seeds give equal noise."""

    noise_seed: int
    advantage: float  # 0 for a sample without an advantage (its weight is 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(TermBatch):
    """B terms: clean latents and the noise that gives `latents`, both [B, ...]; credit [B]."""

    clean: Tensor
    noise: Tensor
    credit: Tensor  # from ForwardProcess.credit_from_advantage


class ForwardProcess(RlAlgorithm[ForwardTerm, ForwardBatch]):
    settings: ForwardProcessSettings

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelFacts | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.sigmas: list[float] = sigmas[:-1].tolist()
        self.num_levels = self.settings.terms_per_sample(recipe.sampling)
        self.shift = self.settings.flow_shift
        if self.settings.levels == "stratified" and self.shift is None and model is not None:
            self.shift = model.flow_shift(self.sampling)

    def plan(self, step: int) -> Plan:
        return rollout_plan(self.sampling, self.grid, run_seed=self.run_seed, step=step)

    def credit(self, advantage: float) -> float:
        """Return the loss coefficient `batch.credit` of this advantage. Default: the advantage itself."""
        return advantage

    def key(self, rollout: Rollout) -> tuple[int | str, ...]:
        """Return the key of a sample's noise levels and noise within an RL step. Default: its seed.

        Samples with equal keys are trained at equal noise levels with equal noise.
        """
        return (rollout.seed,)

    def levels(self, step: int, *key: int | str) -> list[tuple[int, float]]:
        """Return the (index, sigma) pairs of the samples with this key, in training order.

        The index is the denoising step of the rollout (`levels: grid`) or the stratum of (0, 1).
        """
        if self.settings.levels == "grid":
            seed = derive_seed(self.run_seed, "timesteps", step, *key)
            return [(k, self.sigmas[k]) for k in drawn_steps(len(self.sigmas), self.num_levels, seed)]
        assert self.shift is not None, "built without a model: the timestep shift is unknown"
        return list(enumerate(stratified_sigmas(self.num_levels, self.shift, self.run_seed, step, *key)))

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[ForwardTerm]]:
        rows_by_update = shared_out(len(rollouts.mine), rollouts.first, self.settings.updates_per_rollout)
        return [
            [
                term
                for row in rows
                for term in self._terms(row, rollouts.mine[row], advantages[rollouts.first + row], step)
            ]
            for rows in rows_by_update
        ]

    def _terms(self, row: int, rollout: Rollout, advantage: float | None, step: int) -> list[ForwardTerm]:
        key = self.key(rollout)
        return [
            ForwardTerm(
                row=row,
                sigma=sigma,
                noise_seed=derive_seed(self.run_seed, "train_noise", step, *key, k),
                advantage=0.0 if advantage is None else advantage,
                weight=0.0 if advantage is None else 1.0,
            )
            for k, sigma in self.levels(step, *key)
        ]

    def assemble(self, terms: Sequence[ForwardTerm], rollouts: Sequence[Rollout], device: torch.device) -> ForwardBatch:
        """Build the batch. Noise depends only on each term's seed."""
        samples = [rollouts[t.row] for t in terms]
        clean = torch.stack([s.clean_latents for s in samples])
        numbers = [t.sigma for t in terms], [t.weight for t in terms], [self.credit(t.advantage) for t in terms]
        sigma, weight, credit = columns(device, *numbers)
        noisy, noise = noised(clean, sigma, [t.noise_seed for t in terms])
        return ForwardBatch(
            latents=noisy,
            sigma=sigma,
            weight=weight,
            prompts=[s.prompt for s in samples],
            conditional_frames=self.conditional_frames(samples, device),
            clean=clean,
            noise=noise,
            credit=credit,
        )
