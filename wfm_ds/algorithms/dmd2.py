"""DMD2 (arXiv 2405.14867) without real images: the student's samples follow the distribution of the teacher's samples.

A second trained network, the fake score, learns the distribution of the student's predictions. The student's
predictions move in the direction from the fake score's prediction to the teacher's prediction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.advantages import Advantages, Rewards
from wfm_ds.algorithms.base import LossTerm, LossTermBatch, RlAlgorithm, Stats, StepSamples
from wfm_ds.algorithms.ddrl_losses import broadcast_over_latents
from wfm_ds.algorithms.diffusion_nft import nft_loss, reward_weights
from wfm_ds.algorithms.forward_process import ForwardBatch
from wfm_ds.recipe.algorithms import FAKE_SCORE, DistillationSettings, Dmd2Algorithm
from wfm_ds.sampling.denoise import transition_log_prob
from wfm_ds.sampling.latents import add_noise, sample_mean
from wfm_ds.sampling.plan import apply_shift, invert_shift, rollout_plan
from wfm_ds.seeds import derive_seed, draw_uniform
from wfm_ds.tensor_memory import copy_to_device, lists_to_device
from wfm_ds.types import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import NoiseLevels
    from wfm_ds.recipe.algorithms.base import ModelProperties
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.sampling.denoise import FlowPlan
    from wfm_ds.types import Rollout

TEACHER = "teacher"
MIN_SCALE = 1e-3  # lower bound of the divisor in dmd_direction


def dmd_direction(
    teacher_velocity: Tensor,
    fake_velocity: Tensor,
    latents: Tensor,
    sigma: Tensor,
    prediction: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Return DMD's gradient direction d for the clean latents h that the student predicted, [B, ...].

    The velocities v of the teacher and of the fake score are predictions at the noisy latents y (h with noise of level
    s). They give the predictions x0_hat = y - s*v of the clean latents. The direction is

        d = (x0_hat_fake - x0_hat_teacher) / max(mean|h - x0_hat_teacher|, 1e-3)

    latents: y, [B, ...]. sigma: s, [B]. prediction: h, [B, ...]. mask: as in sample_mean.
    """
    s = broadcast_over_latents(sigma, latents)
    teacher_clean = latents - s * teacher_velocity
    scale = sample_mean((prediction - teacher_clean).abs(), mask).clamp_min(MIN_SCALE)
    return s * (teacher_velocity - fake_velocity) / broadcast_over_latents(scale, latents)


def dmd_loss(velocity: Tensor, latents: Tensor, sigma: Tensor, direction: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return mean(h * d) of each sample, [B], with h = x - sigma*v.

    The gradient with respect to h is d / n for n elements, as for DMD2's loss mean((h - (h - d).detach())^2) / 2.
    velocity: v at x = latents, [B, ...]. sigma: [B]. direction: d, [B, ...], without gradient. mask: as in sample_mean.
    """
    prediction = latents - broadcast_over_latents(sigma, latents) * velocity
    return sample_mean(prediction * direction.detach(), mask)


def draw_level(levels: NoiseLevels, shift: float, quantile: float) -> float:
    """Return a quantile of the density of noise levels between levels.min and levels.max, rounded to float32.

    shift: timestep shift of the density. quantile: in [0, 1).
    """
    bounds = torch.tensor([levels.min, levels.max], dtype=torch.float64)
    low, high = invert_shift(bounds, shift).tolist()
    if levels.density == "uniform":
        q = low + quantile * (high - low)
    else:
        normal = NormalDist()
        first, last = (normal.cdf(math.log(q / (1 - q))) for q in (low, high))
        q = 1 / (1 + math.exp(-normal.inv_cdf(first + quantile * (last - first))))
    return float(apply_shift(torch.tensor(q, dtype=torch.float64), shift).float())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dmd2Term(LossTerm):
    """One denoising step of a sample, and the noise to add to the prediction of this step."""

    trains_fake: bool
    denoise_step: int
    level: float  # noise level for the teacher and the fake score
    noise_seed: int
    advantage: float = 0.0
    transition_factor: float = 0.0  # TransitionReward.factor
    reward_level: float = 0.0  # noise level for diffusion_nft's loss
    reward_noise_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatch(LossTermBatch):
    """Training batch of the fake score: B predictions of the student, with noise added."""

    target: Tensor  # [B, ...], target velocity: noise - prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionReward:
    """The inputs of flow_grpo's loss for B denoising steps."""

    next_latents: Tensor  # [B, ...]
    coefficients: Tensor  # [B,5] float64
    advantage: Tensor  # [B]
    factor: Tensor  # [B], number of all steps / number of steps with noise; 0 for steps without noise


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentBatch(LossTermBatch):
    """B denoising steps of the student's rollouts, and the clean latents that these steps predicted."""

    noisy_prediction: Tensor  # [B, ...], prediction with noise added
    level: Tensor  # [B], noise level of noisy_prediction
    prediction: Tensor  # [B, ...], predicted clean latents
    transition: TransitionReward | None = None
    renoised: ForwardBatch | None = None  # the inputs of diffusion_nft's loss

    def parts(self) -> Sequence[LossTermBatch]:
        return [self] if self.renoised is None else [self, self.renoised]

    def reference_inputs(self) -> LossTermBatch:
        return LossTermBatch(
            latents=self.noisy_prediction,
            sigma=self.level,
            weight=self.weight,
            prompts=self.prompts,
            conditioning_frames=self.conditioning_frames,
        )


class Dmd2(RlAlgorithm[Dmd2Term, LossTermBatch]):
    Settings = Dmd2Algorithm
    base_settings = DistillationSettings
    area = "dmd"
    settings: Dmd2Algorithm
    references = (FAKE_SCORE, TEACHER)

    def __init__(self, recipe: Recipe, sigmas: Tensor, model: ModelProperties | None = None) -> None:
        super().__init__(recipe, sigmas, model)
        self.num_steps = len(sigmas) - 1
        self.reference_weights = {TEACHER: next(iter(self.settings.list_lora_teachers()), "ref")}
        self.reference_guidance = {TEACHER: self.settings.teacher.guidance_scale, FAKE_SCORE: 1.0}
        self.shift = self.settings.levels.shift or self.sampling.grid_shift
        if self.shift is None and model is not None:
            self.shift = model.flow_shift(self.sampling)

    def plan(self, step: int) -> FlowPlan:
        plan = rollout_plan(self.sampling, self.grid, run_seed=self.run_seed, step=step)
        return dataclasses.replace(plan, keep_states=True, keep_predictions=True)

    def needs_reference(self, term: Dmd2Term, reference: str) -> bool:
        return not term.trains_fake

    def choose_adapter(self, step: int, update: int) -> str:
        fake = self.settings.fake
        return FAKE_SCORE if update < fake.updates or step <= fake.warmup_steps else DEFAULT_ADAPTER

    def compute_advantages(self, rewards: Rewards, groups: Sequence[str]) -> Advantages:
        """See RlAlgorithm. With a reward loss, the advantage of a sample without a reward is 0, not None."""
        advantages = super().compute_advantages(rewards, groups)
        if self.settings.reward is None:
            return advantages
        return Advantages([value or 0.0 for value in advantages.values], advantages.stats)

    def updates(self, rollouts: StepSamples, advantages: Sequence[float | None], step: int) -> list[list[Dmd2Term]]:
        """Return the loss terms of each update of the fake score, then the loss terms of the student's update.

        In the first `fake.warmup_steps` RL steps, the last update trains the fake score instead of the student.
        """
        plan, first = self.plan(step), rollouts.first_index
        return [
            [
                self._make_term(row, rollout, advantages[first + row] or 0.0, plan, step, update)
                for row, rollout in enumerate(rollouts.local_rollouts)
            ]
            for update in range(self.settings.num_updates)
        ]

    def _make_term(
        self, row: int, rollout: Rollout, advantage: float, plan: FlowPlan, step: int, update: int
    ) -> Dmd2Term:
        key = (step, update, rollout.seed)
        denoise_step = derive_seed(self.run_seed, "distilled_step", *key) % self.num_steps
        level, noise_seed = self._draw_noise("distillation", *key)
        trains_fake, noisy = self.choose_adapter(step, update) == FAKE_SCORE, plan.trainable_noisy_steps
        term = Dmd2Term(
            row=row,
            sigma=level if trains_fake else plan.steps[denoise_step].sigma,
            weight=1.0 if rollout.is_finite else 0.0,
            trains_fake=trains_fake,
            denoise_step=denoise_step,
            level=level,
            noise_seed=noise_seed,
            advantage=advantage,
            transition_factor=self.num_steps / len(noisy) if denoise_step in noisy else 0.0,
        )
        if trains_fake or self.settings.passes_per_term == 1:
            return term
        reward_level, reward_noise_seed = self._draw_noise("reward", *key)
        return dataclasses.replace(term, num_parts=2, reward_level=reward_level, reward_noise_seed=reward_noise_seed)

    def _draw_noise(self, purpose: str, *key: int) -> tuple[float, int]:
        assert self.shift is not None, "built without a model: the timestep shift is unknown"
        quantile = draw_uniform(self.run_seed, f"{purpose}_level", *key)
        level = draw_level(self.settings.levels, self.shift, quantile)
        return level, derive_seed(self.run_seed, f"{purpose}_noise", *key)

    def assemble(self, terms: Sequence[Dmd2Term], rollouts: Sequence[Rollout], device: torch.device) -> LossTermBatch:
        samples = [rollouts[t.row] for t in terms]
        prediction = torch.stack([s.predictions[t.denoise_step] for s, t in zip(samples, terms, strict=True)])
        sigma, weight, level = lists_to_device(
            device, [t.sigma for t in terms], [t.weight for t in terms], [t.level for t in terms]
        )
        noisy, noise = add_noise(prediction, level, [t.noise_seed for t in terms])
        prompts, frames = [s.prompt for s in samples], self.conditioning_frames(samples, device)
        if terms[0].trains_fake:
            return FakeBatch(
                latents=noisy,
                sigma=level,
                weight=weight,
                prompts=prompts,
                conditioning_frames=frames,
                target=noise - prediction,
            )
        batch = StudentBatch(
            latents=torch.stack([s.states[t.denoise_step] for s, t in zip(samples, terms, strict=True)]),
            sigma=sigma,
            weight=weight,
            prompts=prompts,
            conditioning_frames=frames,
            noisy_prediction=noisy,
            level=level,
            prediction=prediction,
        )
        if self.settings.reward is None:
            return batch
        if self.settings.passes_per_term == 2:
            return dataclasses.replace(batch, renoised=self._renoise_samples(terms, samples, batch))
        return dataclasses.replace(batch, transition=self._select_transitions(terms, samples, device))

    def _renoise_samples(
        self, terms: Sequence[Dmd2Term], samples: Sequence[Rollout], batch: StudentBatch
    ) -> ForwardBatch:
        reward = self.settings.reward
        assert reward is not None
        device, clean = batch.latents.device, torch.stack([s.clean_latents for s in samples])
        credits = reward_weights([t.advantage for t in terms], reward.adv_clip_max).tolist()
        sigma, credit = lists_to_device(device, [t.reward_level for t in terms], credits)
        noisy, noise = add_noise(clean, sigma, [t.reward_noise_seed for t in terms])
        return ForwardBatch(
            latents=noisy,
            sigma=sigma,
            weight=batch.weight,
            prompts=batch.prompts,
            conditioning_frames=batch.conditioning_frames,
            clean_latents=clean,
            noise=noise,
            credit=credit,
        )

    def _select_transitions(
        self, terms: Sequence[Dmd2Term], samples: Sequence[Rollout], device: torch.device
    ) -> TransitionReward:
        last = self.num_steps - 1
        following = [s.states[min(t.denoise_step + 1, last)] for s, t in zip(samples, terms, strict=True)]
        advantage, factor = lists_to_device(device, [t.advantage for t in terms], [t.transition_factor for t in terms])
        return TransitionReward(
            next_latents=torch.stack(following),
            coefficients=copy_to_device(self.noisy_table[[t.denoise_step for t in terms]], device),
            advantage=advantage,
            factor=factor,
        )

    def loss(self, velocity: Tensor, batch: LossTermBatch, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        match batch:
            case FakeBatch():
                loss = sample_mean((velocity - batch.target).square(), batch.loss_mask)
                return loss, {"dmd/fake_loss": loss.detach()}
            case ForwardBatch():
                return self._nft_loss(velocity, batch)
            case StudentBatch():
                return self._student_loss(velocity, batch, references)
        raise TypeError(type(batch))

    def _student_loss(
        self, velocity: Tensor, batch: StudentBatch, references: Mapping[str, Tensor]
    ) -> tuple[Tensor, Stats]:
        inputs, mask = (batch.noisy_prediction, batch.level, batch.prediction), batch.loss_mask
        direction = dmd_direction(references[TEACHER], references[FAKE_SCORE], *inputs, mask)
        loss = dmd_loss(velocity, batch.latents, batch.sigma, direction, mask)
        stats: Stats = {"dmd/gap": sample_mean(direction.square(), mask).sqrt()}
        if batch.transition is None:
            return loss, stats
        assert self.settings.reward is not None
        reward_loss = transition_reward_loss(velocity, batch.latents, batch.transition, mask)
        return loss + self.settings.reward.weight * batch.transition.factor * reward_loss, stats

    def _nft_loss(self, velocity: Tensor, batch: ForwardBatch) -> tuple[Tensor, Stats]:
        reward = self.settings.reward
        assert reward is not None
        loss, _ = nft_loss(
            velocity,
            velocity,  # on-policy: the old velocity is the trained one, without gradient
            batch.clean_latents,
            batch.noise,
            batch.sigma,
            batch.credit,
            beta=reward.beta,
            adv_clip_max=reward.adv_clip_max,
            kl_beta=0.0,
            mask=batch.loss_mask,
        )
        return reward.weight * loss, {"dmd/reward_loss": loss.detach()}


def transition_reward_loss(
    velocity: Tensor, latents: Tensor, transition: TransitionReward, mask: Tensor | None = None
) -> Tensor:
    """Return flow_grpo's loss of each denoising step, [B], for a probability ratio of 1.

    velocity: prediction at `latents`, [B, ...]. mask: as in sample_mean.
    """
    log_prob = transition_log_prob(velocity, latents, transition.next_latents, transition.coefficients, mask)
    return -transition.advantage * (log_prob - log_prob.detach()).exp()
