"""Settings of on-policy distillation and DMD2: a LoRA, the student, learns from teachers on its own samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.errors import RecipeError, UserError
from wfm_ds.recipe.algorithms.advantages import AdvantageSettings
from wfm_ds.recipe.algorithms.base import (
    BASE_WEIGHTS,
    INITIAL_LORA,
    AdapterOptimizer,
    ConditioningFrameKeys,
    ModelProperties,
    RecipeSections,
    TeacherSettings,
)
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.section import Section
from wfm_ds.types import Prompt

FAKE_SCORE = "fake"  # adapter of DMD2's second trained network


class DistillationSettings(ConditioningFrameKeys):
    """Base class of the settings of the distillation algorithms."""

    compares_log_probs = False
    supports_async = False

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset() if all(teacher.has_lora for teacher in self.list_teachers()) else frozenset({"ref"})

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        self._check_lora(recipe)
        self._check_selection(recipe)
        if recipe.sampling.guidance_scale != 1:
            raise ValueError(
                f"sampling.guidance_scale {recipe.sampling.guidance_scale:g}: the student of {self.name} needs no "
                "guidance: set it to 1, and guidance_scale of the teacher instead"
            )

    def _check_lora(self, recipe: RecipeSections) -> None:
        if recipe.lora is None:
            raise ValueError(f"algorithm {self.name} trains only a LoRA: add the section lora")
        if recipe.lora.dropout:
            raise ValueError(f"lora.dropout: algorithm {self.name} compares predictions without dropout: remove it")
        initial = [teacher for teacher in self.list_teachers() if teacher.weights == INITIAL_LORA]
        if initial and recipe.lora.init_from is None:
            raise ValueError(f"algorithm {self.name} has a teacher with weights: {INITIAL_LORA}: set lora.init_from")

    def _check_selection(self, recipe: RecipeSections) -> None:
        by_reward = {
            "sampling.explore": recipe.sampling.explore is not None,
            "rollout.max_refills": recipe.rl.rollout.max_refills > 0,
            "data.choose: reward_std": recipe.data.choose == "reward_std",
        }
        for key, is_set in by_reward.items():
            if is_set:
                raise ValueError(f"{key} chooses by reward, but {self.name} trains on every sample: remove it")

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        if len(model.sigma_ranges) > 1:
            raise RecipeError(f"algorithm {self.name} does not support {model.family} yet, which has two experts")
        for scale in {teacher.guidance_scale for teacher in self.list_teachers()} - {1.0}:
            try:
                model.check_sampling(sampling.model_copy(update={"guidance_scale": scale}))
            except UserError as error:
                raise RecipeError(
                    f"algorithm {self.name} has a teacher with guidance_scale {scale:g}, which this model does not "
                    f"support: set it to 1, or use the base model as model.path ({error})"
                ) from error


class SelectedTeacher(TeacherSettings):
    """A teacher of on-policy distillation, and the prompts that it teaches."""

    when: dict[str, Any] = Field(default_factory=dict)
    """{metadata key: value} of the prompts that this teacher teaches. Every prompt needs exactly one teacher. Unset:
    all prompts."""

    def teaches(self, prompt: Prompt) -> bool:
        return all(key in prompt.metadata and prompt.metadata[key] == value for key, value in self.when.items())


class OpdAlgorithm(DistillationSettings):
    """On-policy distillation: at the noisy latents of its own rollouts, the student learns to predict what a teacher
    predicts. With a guided teacher, this is guidance distillation."""

    name: Literal["opd"]
    """Selects this algorithm."""
    teachers: list[SelectedTeacher] = Field(min_length=1)
    """The teachers. With several teachers, `when` selects the teacher of a prompt by the prompt's metadata."""
    num_levels: PositiveInt = 1
    """Number of denoising steps that each sample is trained on, chosen at random from the steps of its rollout."""
    weighting: Literal["uniform", "kl"] = "uniform"
    """Loss at a denoising step. `uniform`: the mean squared difference between the velocities that student and teacher
    predict. `kl`: the KL divergence of student and teacher at this step of a stochastic solver, as a mean over
    elements."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step. Each one trains on an equal part of the samples."""

    implementation = "wfm_ds.algorithms.opd:OnPolicyDistillation"

    def list_teachers(self) -> list[SelectedTeacher]:
        return self.teachers

    def choose_teacher(self, prompt: Prompt) -> int:
        fitting = [i for i, teacher in enumerate(self.teachers) if teacher.teaches(prompt)]
        if len(fitting) != 1:
            raise RecipeError(
                f"algorithm.teachers: prompt {prompt.id} has {len(fitting)} teachers by its metadata "
                f"{dict(prompt.metadata)}, each prompt needs one: change `when`"
            )
        return fitting[0]

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self.choose_teacher(prompt)

    @property
    def num_sample_parts(self) -> int:
        return self.updates_per_rollout

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return self.num_levels

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        sampling, most, key = recipe.sampling, recipe.sampling.steps, "sampling.steps"
        if self.weighting == "kl":
            if not sampling.is_stochastic:
                raise ValueError(
                    f"algorithm.weighting: kl needs a stochastic solver, sampling.solver {sampling.solver} adds no "
                    "noise: set it to cps, or weighting to uniform"
                )
            most, key = sampling.num_noisy_steps, "the number of noisy steps"
        if self.num_levels > most:
            raise ValueError(f"algorithm.num_levels {self.num_levels} is more than {key} {most}: lower it")
        if any(teacher.when for teacher in self.teachers) and recipe.data.kind != "prompts":
            raise ValueError(
                f"algorithm.teachers: `when` reads the metadata of prompts, but data.kind is {recipe.data.kind}: "
                "remove it, or set data.kind: prompts"
            )
        if len(self.teachers) > 1 and not all(teacher.when for teacher in self.teachers):
            raise ValueError("algorithm.teachers: with several teachers, each needs `when`, so that prompts have one")
        start = BASE_WEIGHTS if recipe.lora is None or recipe.lora.init_from is None else INITIAL_LORA
        if all(teacher.weights == start and teacher.guidance_scale == 1 for teacher in self.teachers):
            raise ValueError(
                f"algorithm.teachers: the student starts with the weights of its teacher ({start}) and learns nothing: "
                "set guidance_scale above 1, or other weights"
            )


class NoiseLevels(Section):
    """Random noise levels at which DMD2 compares teacher and fake score."""

    density: Literal["uniform", "logit_normal"] = "uniform"
    """Probability density of the level before the shift."""
    min: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Lowest level, after the shift."""
    max: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """Highest level, after the shift."""
    shift: PositiveFloat | None = None
    """Shift in sigma = shift * q / (1 + (shift - 1) * q) for a random q. Unset: `sampling.grid_shift`, or the shift of
    the pipeline's scheduler."""

    @model_validator(mode="after")
    def _check_bounds(self) -> NoiseLevels:
        if self.min >= self.max:
            raise ValueError(f"min {self.min} must be below max {self.max}")
        return self


class FakeScore(AdapterOptimizer):
    """The fake score of DMD2: a second LoRA that learns to denoise the student's samples. It is not exported."""

    updates: PositiveInt = 5
    """Optimizer steps of the fake score in each RL step, before the optimizer step of the student. All of these steps
    use the same samples, with different noise."""
    warmup_steps: NonNegativeInt = 0
    """RL steps at the start of the run that train only the fake score."""


class RewardLoss(AdvantageSettings):
    """A reward loss that is added to the distillation loss, on the same samples. Needs the section `reward`."""

    loss: Literal["flow_grpo", "diffusion_nft"]
    """`flow_grpo`: policy gradient on the denoising step that the distillation loss trains, in the same forward pass;
    needs a stochastic solver. `diffusion_nft`: loss of DiffusionNFT, which adds noise to the generated sample and needs
    one more forward and backward pass."""
    weight: PositiveFloat = 1.0
    """Weight of the reward loss. The weight of the distillation loss is 1."""
    beta: PositiveFloat = 1.0
    """With `loss: diffusion_nft`: like `beta` of the algorithm `diffusion_nft`."""

    @model_validator(mode="after")
    def _check_unused_keys(self) -> RewardLoss:
        if self.loss != "diffusion_nft":
            self.require_defaults("beta", unless="loss: diffusion_nft")
        return self


class Dmd2Algorithm(DistillationSettings):
    """DMD2 (arXiv 2405.14867) without real images: the student learns to match, in a few denoising steps, the
    distribution of the teacher's samples."""

    name: Literal["dmd2"]
    """Selects this algorithm."""
    teacher: TeacherSettings = TeacherSettings()
    """The teacher that the student learns from."""
    fake: FakeScore = FakeScore()
    """The fake score, a second LoRA that learns to denoise the student's samples."""
    levels: NoiseLevels = NoiseLevels()
    """The noise levels at which teacher and fake score are compared."""
    reward: RewardLoss | None = None
    """Reward loss that is added to the distillation loss. Unset: no rewards."""

    implementation = "wfm_ds.algorithms.dmd2:Dmd2"

    def list_teachers(self) -> list[TeacherSettings]:
        return [self.teacher]

    @property
    def advantages(self) -> AdvantageSettings | None:
        return self.reward

    @property
    def num_updates(self) -> int:
        return self.fake.updates + 1

    def num_default_updates(self, num_steps: int) -> int:
        return max(0, num_steps - self.fake.warmup_steps)

    @property
    def passes_per_term(self) -> int:
        return 2 if self.reward is not None and self.reward.loss == "diffusion_nft" else 1

    @property
    def extra_adapters(self) -> dict[str, AdapterOptimizer]:
        return {FAKE_SCORE: self.fake}

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return 1

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.fake.warmup_steps >= recipe.run.steps:
            raise ValueError(
                f"algorithm.fake.warmup_steps {self.fake.warmup_steps} leaves none of run.steps {recipe.run.steps} for "
                "the student: lower it"
            )
        sampling = recipe.sampling
        if (sampling.eval_steps, sampling.eval_grid) != (sampling.steps, sampling.grid):
            raise ValueError(
                f"sampling.eval_steps {sampling.eval_steps} and eval_grid {sampling.eval_grid} are not those of the "
                f"student's rollouts: set eval_steps to {sampling.steps} and eval_grid to {sampling.grid}"
            )
        if self.reward is None or self.reward.loss != "flow_grpo":
            return
        if recipe.rl.rollout.merge_lora:
            raise ValueError(
                "rollout.merge_lora rounds the weights, but algorithm.reward.loss: flow_grpo compares "
                "log-probabilities: remove it"
            )
        if sampling.steps == 1:
            raise ValueError(
                "algorithm.reward.loss: flow_grpo needs a denoising step with noise, but sampling.steps is 1: set loss "
                "to diffusion_nft, or use more steps"
            )
        if not sampling.is_stochastic:
            raise ValueError(
                f"algorithm.reward.loss: flow_grpo needs a stochastic solver, sampling.solver {sampling.solver} adds "
                "no noise: set sampling.solver to cps and noise_level to 1, or loss to diffusion_nft"
            )

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        super().check_model(model, sampling)
        if self.levels.shift is None and sampling.grid_shift is None:
            try:
                model.flow_shift(sampling)
            except UserError as error:
                raise RecipeError("the scheduler has no fixed shift: set algorithm.levels.shift") from error
