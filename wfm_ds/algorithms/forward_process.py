"""The common part of algorithms on the forward process: a rollout gives clean latents and a reward, the loss looks at
them noised again. How they were denoised, and at which noise levels, does not matter to it.

A child has its settings, `loss`, and where it needs them `credit`, `references` and `moves`.
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
    """A sample at a noise level. Equal seeds are equal noise."""

    noise_seed: int
    advantage: float  # 0 for a sample that has none, whose weight is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(TermBatch):
    """B terms: clean latents, and the noise that makes `latents` of them, [B, ...]; credit [B]."""

    clean: Tensor
    noise: Tensor
    credit: Tensor  # what ForwardProcess.credit makes of the advantages


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
        """Return what the loss takes for this advantage, in the precision of the host: batch.credit. Here itself."""
        return advantage

    def key(self, rollout: Rollout) -> tuple[int | str, ...]:
        """Return what a sample's noise levels and noise follow from within an RL step: here its own seed. Samples with
        equal keys are trained on equal levels and noise."""
        return (rollout.seed,)

    def levels(self, step: int, *key: int | str) -> list[tuple[int, float]]:
        """The noise levels of the samples with this key in the order of training, each with its number: of the
        rollout's denoise step, or of the part of (0, 1)."""
        if self.settings.levels == "grid":
            seed = derive_seed(self.run_seed, "timesteps", step, *key)
            return [(k, self.sigmas[k]) for k in drawn_steps(len(self.sigmas), self.num_levels, seed)]
        assert self.shift is not None, "built to plan rollouts: it was not told the model's shift"
        return list(enumerate(stratified_sigmas(self.num_levels, self.shift, self.run_seed, step, *key)))

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[ForwardTerm]]:
        rows_of = shared_out(len(rollouts.mine), rollouts.first, self.settings.updates_per_rollout)
        return [
            [
                term
                for row in rows
                for term in self._terms(row, rollouts.mine[row], advantages[rollouts.first + row], step)
            ]
            for rows in rows_of
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
        """Noise follows from each term's seed."""
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
