"""The recipe: its sections, and what must hold between them.

Reading files, overrides and error messages with line numbers are in recipe/file.py.
"""

from __future__ import annotations

from pydantic import model_validator

from wfm_ds.recipe.algorithms import Algorithm, RlSections, RlSettings, SftAlgorithm
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
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
        return self.algorithm.is_rl

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
        self._sections_are_there()
        self._data_fits()
        self._all_keys_are_read()
        self.algorithm.check(self)
        if self.model.denoiser_init == "random" and self.lora is not None:
            raise ValueError("model.denoiser_init: random trains all weights: remove the lora section")
        if self.reward is not None:
            self._waits_fit(self.reward)
        return self

    def _sections_are_there(self) -> None:
        name, of_rl = self.algorithm.name, {"rollout": self.rollout, "reward": self.reward}
        missing = [section for section, value in of_rl.items() if value is None]
        if self.is_rl and missing:
            raise ValueError(f"algorithm {name} needs the section {' and '.join(missing)}")
        if not self.is_rl and len(missing) < len(of_rl):
            unread = [section for section in of_rl if section not in missing]
            raise ValueError(f"{name} does not read the section {' and '.join(unread)}: remove it")
        if self.is_async and not self.rl.algorithm.may_be_async:
            raise ValueError(f"rollout.mode: async is not for algorithm {name}: set it to colocated")

    def _data_fits(self) -> None:
        name, is_prompts = self.algorithm.name, self.data.kind == "prompts"
        if is_prompts and not self.algorithm.takes_prompts:
            raise ValueError(f"algorithm {name} needs captioned media: data.kind paired, cosmos or webdataset")
        if not is_prompts and not self.algorithm.takes_media:
            raise ValueError(f"algorithm {name} needs data.kind: prompts")

    def _all_keys_are_read(self) -> None:
        if unread := unread_keys(self):
            raise ValueError(
                f"algorithm {self.algorithm.name} with data.kind {self.data.kind} does not read "
                f"{' and '.join(unread)}: remove it"
            )
        if unread := unread_async_keys(self):
            raise ValueError(
                f"rollout.mode: colocated does not read {' and '.join(unread)}: remove it, or set mode: async"
            )

    def _waits_fit(self, reward: RewardRecipe) -> None:
        """A rank that waits for rewards as long as it may is not stuck."""
        for key in ("timeout_s", "start_timeout_s"):
            if getattr(reward, key) >= 60 * self.engine.timeout_minutes:
                raise ValueError(
                    f"reward.{key} {getattr(reward, key):g} is not below engine.timeout_minutes "
                    f"{self.engine.timeout_minutes:g} ({60 * self.engine.timeout_minutes:g} s), which would end the "
                    f"run while it waits: raise timeout_minutes or lower {key}"
                )


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
