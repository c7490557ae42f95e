"""The recipe: its sections, and what must hold between them.

Reading files, overrides and error messages with line numbers are in recipe/file.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import model_validator

from wfm_ds.recipe.algorithms import Algorithm, DdrlAlgorithm, FlowGrpoAlgorithm, RlSettings, SftAlgorithm
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sampling import EDM_SOLVERS, NOISE_LEVELS, SamplingRecipe
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.sections import (
    CheckpointRecipe,
    EmaRecipe,
    EngineRecipe,
    LoggingRecipe,
    LoraRecipe,
    ModelRecipe,
    OptimizerRecipe,
    RewardRecipe,
    RolloutRecipe,
    RunRecipe,
    ValidationRecipe,
)

# Keys that not every recipe reads. A key without effect is an error.
OF_ROLLOUTS = ("solver", "noise_level", "window", "same_noise")
OF_PROMPT_SETS = ("name", "split")
OF_MEDIA = ("fps", "allow_repeats", "clip", "crop", "buckets", "max_upscale", "cache_latents")
OF_ASYNC = (
    "max_staleness",
    "spawn",
    "devices",
    "bind",
    "keys",
    "policy_folder",
    "in_flight",
    "lost_after_s",
    "timeout_s",
)
OF_HELD_OUT_MEDIA = ("path", "holdout", "num_images")


@dataclass(frozen=True, slots=True)
class RlSections:
    """The sections that a recipe of reinforcement learning has and any other lacks."""

    algorithm: RlSettings
    rollout: RolloutRecipe
    reward: RewardRecipe


class Recipe(Section):
    """One training job."""

    run: RunRecipe
    model: ModelRecipe
    lora: LoraRecipe | None = None
    engine: EngineRecipe = EngineRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    ema: EmaRecipe | None = None
    data: DataRecipe
    sampling: SamplingRecipe
    algorithm: Algorithm
    rollout: RolloutRecipe | None = None
    reward: RewardRecipe | None = None
    validation: ValidationRecipe = ValidationRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    logging: LoggingRecipe = LoggingRecipe()

    @property
    def is_rl(self) -> bool:
        return self.algorithm.name != "sft"

    @property
    def rl(self) -> RlSections:
        """What the code of reinforcement learning reads. Raises TypeError for another recipe, which is our own bug."""
        if not isinstance(self.algorithm, RlSettings) or self.rollout is None or self.reward is None:
            raise TypeError(f"algorithm {self.algorithm.name} has neither rollouts nor rewards: ask recipe.is_rl first")
        return RlSections(self.algorithm, self.rollout, self.reward)

    @property
    def sft(self) -> SftAlgorithm:
        """The settings of supervised fine-tuning. Raises TypeError for another recipe, which is our own bug."""
        if not isinstance(self.algorithm, SftAlgorithm):
            raise TypeError(f"algorithm {self.algorithm.name} is not sft: ask recipe.is_rl first")
        return self.algorithm

    @property
    def is_async(self) -> bool:
        return self.rollout is not None and self.rollout.mode == "async"

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        if self.is_rl:
            missing = [s for s in ("rollout", "reward") if getattr(self, s) is None]
            if missing:
                raise ValueError(f"algorithm {self.algorithm.name} needs the section {' and '.join(missing)}")
            if self.data.kind != "prompts" and not isinstance(self.algorithm, DdrlAlgorithm):
                raise ValueError(f"algorithm {self.algorithm.name} needs data.kind: prompts")
            if self.is_async and isinstance(self.algorithm, DdrlAlgorithm):
                raise ValueError("rollout.mode: async is not for algorithm ddrl: set it to colocated")
        else:
            unread = [s for s in ("rollout", "reward") if getattr(self, s) is not None]
            if unread:
                raise ValueError(f"sft does not read the section {' and '.join(unread)}: remove it")
            if self.data.kind == "prompts":
                raise ValueError("algorithm sft needs captioned media: data.kind paired, cosmos or webdataset")
        unread = unread_keys(self)
        if unread:
            raise ValueError(
                f"algorithm {self.algorithm.name} with data.kind {self.data.kind} does not read "
                f"{' and '.join(unread)}: remove it"
            )
        if unread := unread_async_keys(self):
            raise ValueError(
                f"rollout.mode: colocated does not read {' and '.join(unread)}: remove it, or set mode: async"
            )
        if isinstance(self.algorithm, RlSettings):
            self._advantages_fit(self.algorithm)
        if isinstance(self.algorithm, FlowGrpoAlgorithm):
            self._solver_fits(self.algorithm)
        if isinstance(self.algorithm, DdrlAlgorithm):
            self._ddrl_fits(self.algorithm)
        else:
            self._no_ddrl_keys()
        if self.model.denoiser_init == "random" and self.lora is not None:
            raise ValueError("model.denoiser_init: random trains all weights: remove the lora section")
        if self.reward is not None:
            self._waits_fit(self.reward)
        return self

    def _waits_fit(self, reward: RewardRecipe) -> None:
        """A rank that waits for rewards as long as it may is not stuck."""
        for key in ("timeout_s", "start_timeout_s"):
            if getattr(reward, key) >= 60 * self.engine.timeout_minutes:
                raise ValueError(
                    f"reward.{key} {getattr(reward, key):g} is not below engine.timeout_minutes "
                    f"{self.engine.timeout_minutes:g} ({60 * self.engine.timeout_minutes:g} s), which would end the "
                    f"run while it waits: raise timeout_minutes or lower {key}"
                )

    def _advantages_fit(self, algorithm: RlSettings) -> None:
        assert self.rollout is not None
        assert self.reward is not None
        if algorithm.best_of_n is not None and algorithm.best_of_n > self.rollout.group_size:
            raise ValueError(
                f"algorithm.best_of_n {algorithm.best_of_n} is more than rollout.group_size {self.rollout.group_size}"
            )
        if algorithm.combine != "sum" and (self.reward.clip is not None or self.reward.scale != 1):
            raise ValueError(
                f"reward.clip and reward.scale act on the weighted sum, which algorithm.combine: {algorithm.combine} "
                "does not use: remove them, or set clip in reward.functions"
            )

    def _solver_fits(self, algorithm: FlowGrpoAlgorithm) -> None:
        solver = self.sampling.solver
        if not self.sampling.is_stochastic:
            raise ValueError(
                f"algorithm {algorithm.name} trains on noisy denoise steps, and sampling.solver {solver} has none: "
                f"choose {', '.join(NOISE_LEVELS)}"
            )
        if solver != "cps":
            algorithm.require_default("log_prob", unless="sampling.solver: cps")
        if algorithm.kl_beta > 0 and algorithm.kl_type == "flow_grpo" and solver == "cps":
            raise ValueError("algorithm.kl_type flow_grpo is not defined for sampling.solver cps: choose gaussian")

    def _ddrl_fits(self, algorithm: DdrlAlgorithm) -> None:
        assert self.rollout is not None
        last = self.sampling.steps - 1
        if self.sampling.solver not in EDM_SOLVERS:
            raise ValueError(
                f"algorithm ddrl rolls out with {' or '.join(EDM_SOLVERS)}: sampling.solver "
                f"{self.sampling.solver} is for other ones"
            )
        if max(algorithm.train_on) >= last:
            raise ValueError(
                f"algorithm.train_on {algorithm.train_on} may go to {last - 1} when sampling.steps is {last + 1}: the "
                "last step has no noise to train on"
            )
        if algorithm.update_ref_every and not algorithm.kl_beta and self.rollout.policy != "reference":
            raise ValueError(
                "algorithm.update_ref_every moves a reference that nothing reads: set algorithm.kl_beta or "
                "rollout.policy: reference, or remove it"
            )
        if algorithm.data_beta and self.sampling.guidance_scale != 1:
            raise ValueError(
                f"algorithm.data_beta trains the prediction without guidance, and sampling.guidance_scale "
                f"{self.sampling.guidance_scale:g} asks for another: set it to 1, or data_beta to 0"
            )
        if (algorithm.data_beta or algorithm.max_num_conditional_frames) and self.data.kind == "prompts":
            raise ValueError(
                "algorithm.data_beta and conditional frames (algorithm.max_num_conditional_frames) need media: set "
                "data.kind: paired"
            )

    def _no_ddrl_keys(self) -> None:
        name = self.algorithm.name
        if self.sampling.solver in EDM_SOLVERS:
            raise ValueError(f"sampling.solver {self.sampling.solver} is for algorithm ddrl; {name} needs another one")
        if self.rollout is not None and self.rollout.policy is not None:
            raise ValueError(f"rollout.policy is read by algorithm ddrl only: {name} knows its policy, remove the key")

    def doubts(self) -> list[str]:
        """What is possible but probably not meant, a sentence each."""
        if isinstance(self.algorithm, DdrlAlgorithm) and self.algorithm.data_beta == 0:
            return [
                "algorithm ddrl without algorithm.data_beta has no data to hold the policy to: it is a policy gradient "
                "with algorithm.kl_beta as its only restraint"
            ]
        return []


def unread_keys(recipe: Recipe) -> list[str]:
    """`section.key` of those that have another value than their default: a resolved recipe names all keys."""
    data = (*OF_MEDIA, "caption_dropout") if recipe.data.kind == "prompts" else OF_PROMPT_SETS
    unread = [("data", key) for key in data]
    if recipe.is_rl:
        unread += [("validation", key) for key in OF_HELD_OUT_MEDIA]
        unread += [("data", "caption_dropout")] if "caption_dropout" not in data else []
    else:
        unread += [("sampling", key) for key in OF_ROLLOUTS]
    return [f"{section}.{key}" for section, key in unread if getattr(recipe, section).changed(key)]


def unread_async_keys(recipe: Recipe) -> list[str]:
    """The same of the keys about workers that generate samples, where the training ranks do."""
    if recipe.rollout is None or recipe.is_async:
        return []
    return [f"rollout.{key}" for key in recipe.rollout.changed(*OF_ASYNC)]
