"""The recipe: its sections, and what must hold between them.

Reading files, overrides and error messages with line numbers are in recipe/file.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import model_validator

from wfm_ds.recipe.algorithms import (
    Algorithm,
    GivenFramesSettings,
    RlSections,
    RlSettings,
    SupervisedSettings,
    VlmSftAlgorithm,
)
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.sections import (
    BasePrecision,
    CheckpointRecipe,
    EmaRecipe,
    EngineRecipe,
    ExportRecipe,
    LoraRecipe,
    ModelRecipe,
    OptimizerRecipe,
    RewardFunction,
    RewardRecipe,
    RolloutRecipe,
    RunRecipe,
)
from wfm_ds.recipe.watching import LoggingRecipe, ValidationRecipe
from wfm_ds.recipe.weights import check_weights

# Keys that not every recipe reads. A key without effect is an error.
OF_ROLLOUTS = ("solver", "noise_level", "window", "explore", "same_noise")
OF_PROMPT_SETS = ("name", "split", "choose")
OF_MEDIA = ("fps", "allow_repeats", "clip", "crop", "buckets", "max_upscale", "cache_latents", "inputs")
OF_CONVERSATIONS = ("media_path", "system_prompt", "max_tokens", "too_long", "pack", "pixels", "video")
OF_SAMPLES = ("prompts", "num_prompts", "seeds", "rollout_correlation", "judges")  # of validation
OF_ASYNC = (
    "max_staleness",
    "base_precision",
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


# The names under which a recipe has no section `sampling`, and what stands there instead: nothing reads it.
LANGUAGE_ALGORITHMS = frozenset({"vlm_sft"})
UNREAD_SAMPLING = SamplingRecipe(height=1, width=1)


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
    export: ExportRecipe = ExportRecipe()
    logging: LoggingRecipe = LoggingRecipe()

    @property
    def is_rl(self) -> bool:
        return self.algorithm.is_rl

    @property
    def rl(self) -> RlSections:
        """The sections of reinforcement learning. Raises TypeError for another recipe, which is our own bug."""
        if not isinstance(self.algorithm, RlSettings) or self.rollout is None or self.reward is None:
            raise TypeError(f"algorithm {self.algorithm.name} has neither rollouts nor rewards: ask recipe.is_rl first")
        return RlSections(self.algorithm, self.rollout, self.reward)

    @property
    def supervised(self) -> SupervisedSettings:
        """The settings of an algorithm that learns from data alone. Raises TypeError for another recipe, which is our
        own bug."""
        if not isinstance(self.algorithm, SupervisedSettings):
            raise TypeError(f"algorithm {self.algorithm.name} is not supervised: ask recipe.is_rl first")
        return self.algorithm

    @property
    def language(self) -> VlmSftAlgorithm:
        """The settings of an algorithm that trains a language model. Raises TypeError for another recipe, which is our
        own bug."""
        if not isinstance(self.algorithm, VlmSftAlgorithm):
            raise TypeError(f"algorithm {self.algorithm.name} trains no language model: ask trains_language first")
        return self.algorithm

    @property
    def judging(self) -> RewardRecipe | None:
        """The judges of evaluations as rewards, asked as the recipe's rewards are; None without any."""
        judges = [RewardFunction(**judge.model_dump()) for judge in self.validation.judges]
        if not judges:
            return None
        asked = self.reward or RewardRecipe(functions=judges)
        return asked.model_copy(update={"functions": judges, "clip": None, "scale": 1.0})

    @property
    def scoring(self) -> RewardRecipe | None:
        """The rewards and the judges: what a service of this run computes. None for a run that scores nothing."""
        if self.reward is None or self.judging is None:
            return self.reward or self.judging
        return self.reward.model_copy(update={"functions": [*self.reward.functions, *self.judging.functions]})

    @property
    def is_async(self) -> bool:
        return self.rollout is not None and self.rollout.mode == "async"

    @property
    def chooses_samples(self) -> bool:
        """An RL step trains on some of the samples that it generates."""
        return self.sampling.explore is not None or (self.rollout is not None and self.rollout.max_refills > 0)

    @property
    def rollout_precision(self) -> BasePrecision | None:
        """The precision of the base where samples are generated, without a backward pass."""
        own = None if self.rollout is None else self.rollout.base_precision
        return own or self.forward_precision

    @property
    def forward_precision(self) -> BasePrecision | None:
        """The precision of the base in forwards of training."""
        return "fp8" if self.model.base_precision == "fp8_twice" else self.model.base_precision

    @property
    def joint_rows(self) -> dict[str, int]:
        """Rows of the largest forward that may hold both halves of guided predictions, by its purpose; of purposes that
        are not named each half has a forward of its own."""
        if self.sampling.guidance_batch == "separate":
            return {}
        exact = not self.is_rl or self.rl.algorithm.compares_log_probs
        return dict.fromkeys(["validation"] if exact else ["validation", "rollout"], self.engine.max_forward_batch)

    @property
    def unread_sections(self) -> frozenset[str]:
        """Sections that this recipe has no use for and that its file must not have."""
        return frozenset({"sampling"} if self.algorithm.trains_language else ())

    @model_validator(mode="before")
    @classmethod
    def _without_sampling(cls, values: Any) -> Any:
        """Fill in the section that nothing reads where a language model is trained. ValueError if it is there."""
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        name = algorithm.get("name") if isinstance(algorithm, dict) else getattr(algorithm, "name", None)
        if not isinstance(name, str) or name not in LANGUAGE_ALGORITHMS:  # a list is told below that it is none
            return values
        if "sampling" in values:
            raise ValueError(f"{name} does not read the section sampling: remove it")
        return {**values, "sampling": UNREAD_SAMPLING}

    @model_validator(mode="after")
    def _sections_fit(self) -> Recipe:
        self._sections_are_there()
        self._data_fits()
        self._all_keys_are_read()
        self._stream_fits()
        self.algorithm.check(self)
        self._draws_have_frames()
        self._trajectories_fit()
        self._samples_can_be_chosen()
        if self.rollout is not None and self.rollout.cuda_graph and not self.is_async:
            self._can_be_recorded()
        check_weights(self)
        self._judges_are_held_out()
        if self.scoring is not None:
            self._waits_fit(self.scoring)
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
        if self.is_async and self.data.buckets is not None:
            raise ValueError(
                "rollout.mode: async generates samples of one size: remove data.buckets, or set mode: colocated"
            )

    def _data_fits(self) -> None:
        algorithm, data = self.algorithm, self.data
        kinds = {
            "prompts": (algorithm.takes_prompts, "data.kind: prompts"),
            "captioned media": (
                algorithm.takes_media or algorithm.num_conditional_frames[1] > 0,
                "captioned media: data.kind folder, paired, cosmos or webdataset",
            ),
            "pairs": (algorithm.takes_pairs, "data.kind: pairs"),
            "llava": (algorithm.takes_conversations, "data.kind: llava"),
        }
        fits = [data.kind] if data.kind in kinds else ["captioned media", *(["pairs"] if data.is_own_kind else [])]
        if not any(kinds[kind][0] for kind in fits):
            if isinstance(algorithm, GivenFramesSettings) and fits[0] == "captioned media":
                raise ValueError(
                    f"algorithm {algorithm.name} reads the media of data.kind {data.kind} where samples are given "
                    "frames of them: set algorithm.max_num_conditional_frames, or data.kind: prompts"
                )
            needed = " or ".join(words for taken, words in kinds.values() if taken)
            raise ValueError(f"algorithm {algorithm.name} needs {needed}")

    def _stream_fits(self) -> None:
        if not self.data.streaming:
            return
        if self.is_rl:
            raise ValueError(f"data.streaming is for SFT, not {self.algorithm.name}: remove it")
        if self.validation.path is None and (self.validation.holdout > 0 or self.validation.prompts is None):
            raise ValueError(
                "data.streaming knows no samples before it trains on them, so none are held out or shown: name a "
                "folder in validation.path, or set validation.holdout: 0 and validation.prompts"
            )

    def _draws_have_frames(self) -> None:
        least = self.algorithm.num_conditional_frames[0]
        if least and self.validation.prompts is not None:
            raise ValueError(
                f"validation.prompts has texts alone, and every sample is given frames "
                f"(algorithm.min_num_conditional_frames {least}): remove it, and name media in validation.path"
            )

    def _trajectories_fit(self) -> None:
        """Refuse trajectories that there are not, and counterfactual ones where there is nothing to exchange, or where
        clips are trained on under what their samples are told."""
        inputs = self.data.inputs
        if inputs and self.validation.prompts is not None:
            raise ValueError(
                "validation.prompts has texts alone, and samples are told data.inputs: remove it, and name media in "
                "validation.path"
            )
        if "actions" in inputs and self.sampling.num_frames == 1:
            raise ValueError(
                "data.inputs: actions lead from frame to frame, and sampling.num_frames: 1 has one frame: raise it, or "
                "remove actions"
            )
        if not self.is_rl or self.rl.rollout.trajectories == "data":
            return
        key = f"rollout.trajectories: {self.rl.rollout.trajectories}"
        wanted = ("actions", "c2w") if self.rl.rollout.trajectories == "shuffle" else ("actions",)
        if not any(name in inputs for name in wanted):
            raise ValueError(f"{key} needs {' or '.join(wanted)} in data.inputs: name one, or remove it")
        if self.rl.rollout.trajectories == "shuffle" and self.rl.rollout.prompts_per_step < 2:
            raise ValueError(f"{key} exchanges those of a step's groups: set rollout.prompts_per_step above 1")
        algorithm = self.rl.algorithm
        if algorithm.num_data(algorithm.terms_per_sample(self.sampling)) > 0:
            raise ValueError(
                f"{key} tells samples what their clips do not show, and {algorithm.name} trains on these clips too: "
                "set algorithm.data_beta: 0, or trajectories: data"
            )

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

    def _samples_can_be_chosen(self) -> None:
        """Refuse recipes in which samples cannot be chosen by their rewards."""
        if not self.is_rl:
            return
        algorithm, rollout, explore = self.rl.algorithm, self.rl.rollout, self.sampling.explore
        chosen_by = [
            *(["sampling.explore"] if explore else []),
            *(["rollout.max_refills"] if rollout.max_refills else []),
        ]
        for key in chosen_by:
            if self.is_async:
                raise ValueError(f"{key} is for colocated rollouts: remove it, or set rollout.mode: colocated")
            if self.data.kind != "prompts":
                raise ValueError(f"{key} is for data.kind: prompts, not {self.data.kind}: remove it")
        if explore is None:
            return
        if algorithm.samples_in_edm:
            raise ValueError(
                f"sampling.explore is not for algorithm {algorithm.name}, whose solvers have a grid of their own: "
                "remove it"
            )
        if algorithm.compares_log_probs and not explore.regenerate:
            raise ValueError(
                f"algorithm {algorithm.name} trains on the denoise steps of its samples, and candidates keep none: set "
                "sampling.explore.regenerate: true"
            )
        if explore.group_size < rollout.group_size:
            raise ValueError(
                f"sampling.explore.group_size {explore.group_size} is less than rollout.group_size "
                f"{rollout.group_size}, the candidates that are kept: raise it"
            )
        if explore.group_size > rollout.group_size and rollout.group_size % 2:
            raise ValueError(
                f"sampling.explore keeps as many best as worst candidates: make rollout.group_size "
                f"{rollout.group_size} even"
            )

    def _can_be_recorded(self) -> None:
        if self.engine.sequence_parallel > 1:
            raise ValueError(
                "rollout.cuda_graph: a graph cannot hold the exchanges between the ranks of a replica; remove the key, "
                "or set engine.sequence_parallel: 1"
            )

    def _judges_are_held_out(self) -> None:
        names = [judge.name for judge in self.validation.judges]
        if len(set(names)) < len(names):
            raise ValueError(f"validation.judges: each may be named once, got {names}")
        functions = [] if self.reward is None else self.reward.functions
        trained = {f.name.partition("/")[0] for f in functions if f.weight != 0}
        for name in names:
            if name.partition("/")[0] in trained:
                raise ValueError(
                    f"validation.judges: {name} is trained on by reward.functions, so it is no held-out judge: remove "
                    "it from one of the two"
                )
            if name in [f.name for f in functions]:
                raise ValueError(
                    f"validation.judges: {name} is in reward.functions too, with weight 0: remove it there, a judge is "
                    "asked at evaluations alone"
                )
        if self.reward is not None and not self.reward.spawn:
            for judge in self.validation.judges:  # a service that runs already has settings of its own
                judge.require_default("workers", "max_batch", unless="reward.spawn: true")

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
    """Keys that this recipe does not read and that have another value than their default, as `section.key`: a resolved
    recipe names all keys."""
    data: tuple[str, ...] = (
        (*OF_MEDIA, "caption_dropout") if recipe.data.kind in ("prompts", "llava") else OF_PROMPT_SETS
    )
    if recipe.data.kind in ("hf", "folder"):
        data = tuple(key for key in data if key != "split")
    data = (*data, *OF_PROMPT_SETS) if recipe.data.kind == "llava" else (*data, *OF_CONVERSATIONS)
    unread = [("data", key) for key in data]
    if recipe.algorithm.trains_language:
        return unread_of(recipe, [*unread, *(("validation", key) for key in OF_SAMPLES), ("logging", "sample_every")])
    if recipe.is_rl:
        gives = recipe.algorithm.num_conditional_frames[1] > 0
        unread += [("validation", key) for key in OF_HELD_OUT_MEDIA if not (gives and key == "path")]
        unread += [("data", "caption_dropout")] if "caption_dropout" not in data else []
    else:
        unread += [*(("sampling", key) for key in OF_ROLLOUTS), ("validation", "rollout_correlation")]
    return unread_of(recipe, unread)


def unread_of(recipe: Recipe, keys: Sequence[tuple[str, str]]) -> list[str]:
    """List those of these keys that are set."""
    return [f"{section}.{key}" for section, key in keys if getattr(recipe, section).changed(key)]


def unread_async_keys(recipe: Recipe) -> list[str]:
    """Keys about rollout workers, set in a recipe whose training ranks generate the samples, as `section.key`."""
    if recipe.rollout is None or recipe.is_async:
        return []
    return [f"rollout.{key}" for key in recipe.rollout.changed(*OF_ASYNC)]
