"""On-policy distillation: the student learns the teacher's predictions at the noisy latents of its own rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from wfm_ds.algorithms.flow_grpo import kl_scale
from wfm_ds.recipe.algorithms import DistillationSettings, OpdAlgorithm
from wfm_ds.sampling.latents import sample_mean
from wfm_ds.sampling.plan import rollout_plan
from wfm_ds.seeds import derive_seed
from wfm_ds.tensor_memory import lists_to_device

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import FlowPlan
    from wfm_ds.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdTerm(LossTerm):
    denoise_step: int  # index of the denoising step


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdBatch(LossTermBatch):
    distance_weight: Tensor  # [B], weight of the squared distance


class OnPolicyDistillation(RlAlgorithm[OpdTerm, OpdBatch]):
    Settings = OpdAlgorithm
    base_settings = DistillationSettings
    area = "opd"
    settings: OpdAlgorithm

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        teachers, frozen = self.settings.teachers, self.settings.list_lora_teachers()
        self.num_teachers = len(teachers)
        self.references = tuple(f"teacher_{i}" for i in range(len(teachers)))
        self.reference_weights = {name: name if name in frozen else "ref" for name in self.references}
        scales = (teacher.guidance_scale for teacher in teachers)
        self.reference_guidance = dict(zip(self.references, scales, strict=True))

    def plan(self, step: int) -> FlowPlan:
        plan = rollout_plan(self.sampling, self.grid, run_seed=self.run_seed, step=step)
        return dataclasses.replace(plan, keep_states=True)

    def needs_reference(self, term: OpdTerm, reference: str) -> bool:
        return reference == self.references[term.teacher]

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[OpdTerm]]:
        parts = split_over_updates(rollouts, advantages, self.settings.updates_per_rollout)
        plan = self.plan(step)
        is_kl = self.settings.weighting == "kl"  # this weight would be infinite at steps without noise
        trained = plan.trainable_noisy_steps if is_kl else range(len(plan.steps))
        return [[term for sample in part for term in self._make_terms(*sample, plan, trained, step)] for part in parts]

    def _make_terms(
        self, row: int, rollout: Rollout, advantage: float | None, plan: FlowPlan, trained: Sequence[int], step: int
    ) -> list[OpdTerm]:
        seed = derive_seed(self.run_seed, "timesteps", step, rollout.seed)
        return [
            OpdTerm(
                row=row,
                sigma=plan.steps[trained[i]].sigma,
                weight=0.0 if advantage is None else 1.0,
                teacher=self.settings.choose_teacher(rollout.prompt),
                denoise_step=trained[i],
            )
            for i in draw_steps(len(trained), self.settings.num_levels, seed)
        ]

    def assemble(self, terms: Sequence[OpdTerm], rollouts: Sequence[Rollout], device: torch.device) -> OpdBatch:
        samples = [rollouts[t.row] for t in terms]
        sigma, weight, distance_weight = lists_to_device(
            device, [t.sigma for t in terms], [t.weight for t in terms], self._distance_weights(terms)
        )
        return OpdBatch(
            latents=torch.stack([s.states[t.denoise_step] for s, t in zip(samples, terms, strict=True)]),
            sigma=sigma,
            weight=weight,
            prompts=[s.prompt for s in samples],
            conditioning_frames=self.conditioning_frames(samples, device),
            distance_weight=distance_weight,
        )

    def _distance_weights(self, terms: Sequence[OpdTerm]) -> list[float]:
        if self.settings.weighting == "uniform":
            return [1.0] * len(terms)
        coefficients = self.noisy_table[[t.denoise_step for t in terms]]
        weights: list[float] = kl_scale("gaussian", coefficients, torch.ones(len(terms))).tolist()
        return weights

    def loss(self, velocity: Tensor, batch: OpdBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        (teacher_velocity,) = references.values()
        distance = sample_mean((velocity - teacher_velocity.detach()).square(), batch.loss_mask)
        return batch.distance_weight * distance, {"opd/distance": distance.detach()}
