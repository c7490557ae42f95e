"""The recipe: all sections, and the checks that involve several sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import model_validator

from wfm_ds.recipe.algorithms import (
    Algorithm,
    ConditioningFrameKeys,
    RlSections,
    RolloutSettings,
    SupervisedSettings,
    VlmSftAlgorithm,
)
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.rollout import RolloutRecipe, ValidationRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.sections import (
    BasePrecision,
    CheckpointRecipe,
    EmaRecipe,
    EngineRecipe,
    ExportRecipe,
    LoggingRecipe,
    LoraRecipe,
    ModelRecipe,
    OptimizerRecipe,
    RewardFunction,
    RewardRecipe,
    RunRecipe,
)
from wfm_ds.recipe.weight_checks import check_weights

LANGUAGE_ALGORITHMS = frozenset({"vlm_sft"})  # their recipes have no section `sampling`
UNUSED_SAMPLING = SamplingRecipe(height=1, width=1)  # placeholder for an unused section


class Recipe(Section):
    """Settings of one training run."""

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
        """Whether the run trains on generated samples: reinforcement learning and distillation."""
        return self.algorithm.is_rl

    @property
    def uses_rewards(self) -> bool:
        return self.algorithm.uses_rewards

    @property
    def uses_guidance(self) -> bool:
        """Whether sampling or a teacher uses guidance, so that negative prompts must be encoded."""
        teachers = self.algorithm.list_teachers()
        return self.sampling.uses_guidance() or any(teacher.guidance_scale != 1 for teacher in teachers)

    @property
    def rl(self) -> RlSections:
        if not isinstance(self.algorithm, RolloutSettings) or self.rollout is None:
            raise TypeError(f"algorithm {self.algorithm.name} has no rollouts: check recipe.is_rl first")
        return RlSections(self.algorithm, self.rollout, self.reward)

    @property
    def supervised_settings(self) -> SupervisedSettings:
        if not isinstance(self.algorithm, SupervisedSettings):
            raise TypeError(f"algorithm {self.algorithm.name} is not supervised: check recipe.is_rl first")
        return self.algorithm

    @property
    def language_settings(self) -> VlmSftAlgorithm:
        if not isinstance(self.algorithm, VlmSftAlgorithm):
            raise TypeError(f"algorithm {self.algorithm.name} trains no language model: check trains_language first")
        return self.algorithm

    @property
    def held_out_reward_settings(self) -> RewardRecipe | None:
        """A `reward` section with the held-out rewards and the run's service settings, or None if there are none."""
        if not (functions := [RewardFunction(**reward.model_dump()) for reward in self.validation.held_out_rewards]):
            return None
        service = self.reward or RewardRecipe(functions=functions)
        return service.model_copy(update={"functions": functions, "clip": None, "scale": 1.0})

    @property
    def all_reward_settings(self) -> RewardRecipe | None:
        """A `reward` section with all rewards of this run, including held-out rewards. None if there are no rewards."""
        if self.reward is None or self.held_out_reward_settings is None:
            return self.reward or self.held_out_reward_settings
        return self.reward.model_copy(
            update={"functions": [*self.reward.functions, *self.held_out_reward_settings.functions]}
        )

    @property
    def is_async(self) -> bool:
        return self.rollout is not None and self.rollout.mode == "async"

    @property
    def selects_samples(self) -> bool:
        return self.sampling.explore is not None or (self.rollout is not None and self.rollout.max_refills > 0)

    @property
    def rollout_precision(self) -> BasePrecision | None:
        """Storage format of the base model's weights in rollouts. None means `model.dtype`."""
        own = None if self.rollout is None else self.rollout.base_precision
        return own or self.forward_precision

    @property
    def forward_precision(self) -> BasePrecision | None:
        """Storage format of the base model's weights in training forward passes. None means `model.dtype`."""
        return "fp8" if self.model.base_precision == "fp8_twice" else self.model.base_precision

    @property
    def joint_guidance_batches(self) -> dict[str, int]:
        """{purpose: maximum batch size of a joint guidance pass}, with purposes `validation` and `rollout`.

        If a purpose is missing, its conditional and unconditional passes are separate.
        """
        if self.sampling.guidance_batch == "separate":
            return {}
        exact = not self.is_rl or self.rl.algorithm.compares_log_probs
        return dict.fromkeys(["validation"] if exact else ["validation", "rollout"], self.engine.max_forward_batch)

    @property
    def unused_sections(self) -> frozenset[str]:
        return frozenset({"sampling"} if self.algorithm.trains_language else ())

    @model_validator(mode="before")
    @classmethod
    def _fill_unused_sampling(cls, values: Any) -> Any:
        """Add a placeholder section `sampling` to language model recipes. Raises ValueError if the section is set."""
        algorithm = values.get("algorithm") if isinstance(values, dict) else None
        name = algorithm.get("name") if isinstance(algorithm, dict) else getattr(algorithm, "name", None)
        if not isinstance(name, str) or name not in LANGUAGE_ALGORITHMS:
            return values
        if "sampling" in values:
            raise ValueError(f"{name} does not read the section sampling: remove it")
        return {**values, "sampling": UNUSED_SAMPLING}

    @model_validator(mode="after")
    def _check_recipe(self) -> Recipe:
        self._check_required_sections()
        self._check_data_kind()
        self._check_unread_keys()
        self._check_streaming()
        self.algorithm.check_recipe(self)
        self._check_conditioning_frames()
        self._check_sources()
        self._check_trajectories()
        self._check_sample_selection()
        check_weights(self)
        self._check_graphs_and_checkpointing()
        self._check_held_out_rewards()
        if self.all_reward_settings is not None:
            self._check_reward_timeouts(self.all_reward_settings)
        return self

    def _check_required_sections(self) -> None:
        name, sections = self.algorithm.name, {"rollout": self.rollout, "reward": self.reward}
        is_read = {"rollout": self.is_rl, "reward": self.uses_rewards}
        missing = [section for section, value in sections.items() if value is None and is_read[section]]
        if missing:
            raise ValueError(f"algorithm {name} needs the section {' and '.join(missing)}")
        unread = [section for section, value in sections.items() if value is not None and not is_read[section]]
        if unread and "reward" in type(self.algorithm).model_fields:
            raise ValueError(f"{name} reads the section reward only with algorithm.reward: set it, or remove reward")
        if unread:
            raise ValueError(f"{name} does not read the section {' and '.join(unread)}: remove it")
        if self.is_async and not self.rl.algorithm.supports_async:
            raise ValueError(f"rollout.mode: async is not supported by algorithm {name}: set it to colocated")
        if self.is_async and self.data.buckets is not None:
            raise ValueError(
                "rollout.mode: async generates samples of a single size: remove data.buckets, or set mode: colocated"
            )

    def _check_data_kind(self) -> None:
        algorithm, data = self.algorithm, self.data
        takes_inputs = algorithm.takes_prompts and bool(data.media_inputs)
        kinds = {
            "prompts": (algorithm.takes_prompts, "data.kind: prompts"),
            "captioned images or videos": (
                algorithm.takes_media or algorithm.conditioning_frame_range[1] > 0 or takes_inputs,
                "captioned images or videos: data.kind folder, paired, cosmos or webdataset",
            ),
            "pairs": (algorithm.takes_pairs, "data.kind: pairs"),
            "llava": (algorithm.takes_conversations, "data.kind: llava"),
        }
        fits = [data.kind] if data.kind in kinds else ["captioned images or videos"]
        fits += ["pairs"] if data.is_user_kind else []
        if not any(kinds[kind][0] for kind in fits):
            if isinstance(algorithm, ConditioningFrameKeys) and fits[0] == "captioned images or videos":
                raise ValueError(
                    f"algorithm {algorithm.name} uses data.kind: {data.kind} only for conditioning frames: set "
                    "algorithm.max_num_conditional_frames, or data.kind: prompts"
                )
            needed = " or ".join(words for taken, words in kinds.values() if taken)
            raise ValueError(f"algorithm {algorithm.name} needs {needed}")

    def _check_streaming(self) -> None:
        if not self.data.streaming:
            return
        if self.is_rl:
            raise ValueError(f"data.streaming is only for SFT, not {self.algorithm.name}: remove it")
        if self.validation.path is None and (self.validation.holdout > 0 or self.validation.prompts is None):
            raise ValueError(
                "data.streaming cannot hold out or show training samples: set validation.path to a folder, or set "
                "validation.holdout: 0 and validation.prompts"
            )

    def _check_conditioning_frames(self) -> None:
        least, most = self.algorithm.conditioning_frame_range
        # With noisy steps, the Cosmos pipelines of diffusers would also add noise to conditioning frames. The SANA-WM
        # pipeline would compute clean latents from a velocity with the wrong sign.
        if self.sampling.eval_solver == "cps" and most > 0:
            raise ValueError(
                "sampling.eval_solver: cps does not work with conditioning frames: set it to ode, or remove "
                "algorithm.max_num_conditional_frames"
            )
        if least and self.validation.prompts is not None:
            raise ValueError(
                f"validation.prompts has no frames, but every sample needs conditioning frames "
                f"(algorithm.min_num_conditional_frames {least}): remove it, and set validation.path"
            )
        if self.validation.clips > 1 and most == 0:
            raise ValueError(
                f"validation.clips {self.validation.clips} continues clips by conditioning frames: set "
                "algorithm.max_num_conditional_frames, or remove it"
            )

    def _check_sources(self) -> None:
        folders = [folder for folder in self.data.input_folders.values() if folder.is_absolute()]
        if folders and self.validation.path is not None:
            raise ValueError(
                f"data.input_folders has {folders[0]}, which validation.path would use too: make it relative to the "
                "folders of the data, such as {source: before}"
            )
        if self.data.target:
            return
        if not self.is_rl or self.rl.algorithm.num_data_terms(self.rl.algorithm.terms_per_sample(self.sampling)) > 0:
            trained = f"{self.algorithm.name} trains on edited images"
            raise ValueError(f"data.target: false: {trained}: remove the key, and add edited images to the data")

    def _check_trajectories(self) -> None:
        inputs = self.data.inputs
        if inputs and self.validation.prompts is not None:
            raise ValueError(
                "validation.prompts has only texts, but samples are conditioned on data.inputs: remove it, and set "
                "validation.path"
            )
        if "actions" in inputs and self.sampling.num_frames == 1:
            raise ValueError("data.inputs: actions needs sampling.num_frames above 1: raise it, or remove actions")
        if not self.is_rl or self.rl.rollout.trajectories == "data":
            return
        key = f"rollout.trajectories: {self.rl.rollout.trajectories}"
        wanted = ("actions", "c2w") if self.rl.rollout.trajectories == "shuffle" else ("actions",)
        if not any(name in inputs for name in wanted):
            raise ValueError(f"{key} needs {' or '.join(wanted)} in data.inputs: add one, or remove it")
        if self.rl.rollout.trajectories == "shuffle" and self.rl.rollout.prompts_per_step < 2:
            raise ValueError(f"{key} exchanges trajectories between groups: set rollout.prompts_per_step above 1")
        algorithm = self.rl.algorithm
        if algorithm.num_data_terms(algorithm.terms_per_sample(self.sampling)) > 0:
            raise ValueError(
                f"{key} does not match the clips, which algorithm {algorithm.name} also trains on: set "
                "algorithm.data_beta: 0, or trajectories: data"
            )

    def _check_unread_keys(self) -> None:
        if unread := list_unread_keys(self):
            raise ValueError(
                f"algorithm {self.algorithm.name} with data.kind {self.data.kind} does not read "
                f"{' and '.join(unread)}: remove it"
            )
        if unread := list_unread_async_keys(self):
            raise ValueError(
                f"rollout.mode: colocated does not read {' and '.join(unread)}: remove it, or set mode: async"
            )

    def _check_sample_selection(self) -> None:
        if not self.is_rl:
            return
        algorithm, rollout, explore = self.rl.algorithm, self.rl.rollout, self.sampling.explore
        for key, is_set in (("sampling.explore", explore), ("rollout.max_refills", rollout.max_refills)):
            if is_set and self.is_async:
                raise ValueError(f"{key} is only for colocated rollouts: remove it, or set rollout.mode: colocated")
            if is_set and self.data.kind != "prompts":
                raise ValueError(f"{key} is only for data.kind: prompts, not {self.data.kind}: remove it")
        if explore is None:
            return
        if algorithm.uses_edm_solvers:
            raise ValueError(f"sampling.explore is not supported by the EDM solvers of {algorithm.name}: remove it")
        if algorithm.compares_log_probs and not explore.regenerate:
            raise ValueError(
                f"algorithm {algorithm.name} trains on denoising steps, which candidates do not store: set "
                "sampling.explore.regenerate: true"
            )
        if explore.group_size < rollout.group_size:
            raise ValueError(
                f"sampling.explore.group_size {explore.group_size} is less than rollout.group_size "
                f"{rollout.group_size}, the number of selected candidates: raise it"
            )
        if explore.group_size > rollout.group_size and rollout.group_size % 2:
            raise ValueError(
                f"sampling.explore selects equally many best and worst candidates: make rollout.group_size "
                f"{rollout.group_size} even"
            )

    def _check_graphs_and_checkpointing(self) -> None:
        records_graphs = self.rollout is not None and self.rollout.cuda_graph and not self.is_async
        if records_graphs and self.engine.sequence_parallel > 1:
            raise ValueError(
                "rollout.cuda_graph: a graph cannot contain the communication between the ranks of a replica: remove "
                "the key, or set engine.sequence_parallel: 1"
            )
        if self.model.gradient_checkpointing != "attention":
            return
        if self.algorithm.trains_language:
            raise ValueError("model.gradient_checkpointing: attention is only for diffusion models: set it to true")
        if self.engine.compile:
            raise ValueError(
                "model.gradient_checkpointing: attention does not see attention inside compiled blocks: set it to "
                "true, or remove engine.compile"
            )

    def _check_held_out_rewards(self) -> None:
        names = [reward.name for reward in self.validation.held_out_rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"validation.held_out_rewards: each may be listed only once, got {names}")
        functions = [] if self.reward is None else self.reward.functions
        trained = {f.name.partition("/")[0] for f in functions if f.weight != 0}
        for name in names:
            if name.partition("/")[0] in trained:
                raise ValueError(
                    f"validation.held_out_rewards: {name} is not held out: remove it from one of them, since "
                    "reward.functions trains on it"
                )
            if name in [f.name for f in functions]:
                raise ValueError(
                    f"validation.held_out_rewards: {name} is also in reward.functions, with weight 0: remove it there; "
                    "held-out rewards are computed only in evaluations"
                )
        if self.reward is not None and not self.reward.spawn:
            for held_out in self.validation.held_out_rewards:  # a running service has its own settings
                held_out.require_defaults("workers", "max_batch", "device", unless="reward.spawn: true")

    def _check_reward_timeouts(self, reward: RewardRecipe) -> None:
        for key in ("timeout_s", "start_timeout_s"):
            if getattr(reward, key) >= 60 * self.engine.timeout_minutes:
                raise ValueError(
                    f"reward.{key} {getattr(reward, key):g} is not below engine.timeout_minutes "
                    f"{self.engine.timeout_minutes:g} ({60 * self.engine.timeout_minutes:g} s), which would end the "
                    f"run while it waits: raise timeout_minutes or lower {key}"
                )


# A table, not one recipe class per kind of run: resolved recipes contain all keys, and most code handles all kinds.
CONDITIONAL_KEYS: tuple[tuple[str, tuple[str, ...], Callable[[Recipe], bool]], ...] = (
    ("data", ("name", "choose"), lambda recipe: recipe.data.kind == "prompts"),
    ("data", ("split",), lambda recipe: recipe.data.kind in ("prompts", "hf", "folder")),
    (
        "data",
        ("fps", "allow_repeats", "clip", "crop", "video_resize", "buckets", "max_upscale", "cache_latents", "inputs"),
        lambda recipe: recipe.data.kind not in ("prompts", "llava"),
    ),
    ("data", ("caption_dropout",), lambda recipe: not recipe.is_rl and recipe.data.kind not in ("prompts", "llava")),
    (
        "data",
        ("media_path", "system_prompt", "max_tokens", "too_long", "pack", "pixels", "video"),
        lambda recipe: recipe.data.kind == "llava",
    ),
    ("sampling", ("solver", "noise_level", "window", "explore", "same_noise"), lambda recipe: recipe.is_rl),
    (
        "validation",
        ("prompts", "num_prompts", "seeds", "clips", "held_out_rewards"),
        lambda recipe: not recipe.algorithm.trains_language,
    ),
    ("validation", ("rollout_correlation",), lambda recipe: recipe.uses_rewards),
    (
        "validation",
        ("path",),
        lambda recipe: (
            not recipe.is_rl or recipe.algorithm.conditioning_frame_range[1] > 0 or bool(recipe.data.media_inputs)
        ),
    ),
    ("validation", ("episodes",), lambda recipe: recipe.data.kind == "lerobot"),
    ("validation", ("holdout", "num_images"), lambda recipe: not recipe.is_rl),
    ("logging", ("sample_every",), lambda recipe: not recipe.algorithm.trains_language),
)
"""(section, keys, is_read): the keys may be set only if is_read(recipe) is true."""
ASYNC_KEYS = (
    *("max_staleness", "base_precision", "spawn", "devices", "bind", "keys", "policy_folder", "in_flight"),
    *("worker_timeout_s", "timeout_s"),
)
"""Keys of `rollout` that only async rollouts read."""


def list_unread_keys(recipe: Recipe) -> list[str]:
    """Return each `section.key` that is set although this recipe does not read it."""
    return [
        f"{section}.{key}"
        for section, keys, is_read in CONDITIONAL_KEYS
        if not is_read(recipe)
        for key in getattr(recipe, section).non_default_keys(*keys)
    ]


def list_unread_async_keys(recipe: Recipe) -> list[str]:
    if recipe.rollout is None or recipe.is_async:
        return []
    return [f"rollout.{key}" for key in recipe.rollout.non_default_keys(*ASYNC_KEYS)]
