"""Base classes of algorithm settings: shared recipe keys, and properties that other modules read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.advantages import AdvantageSettings
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.rollout import MAX_CHUNK, RolloutRecipe
from wfm_ds.recipe.sampling import EDM_SOLVERS, SamplingRecipe
from wfm_ds.recipe.section import Decay, Section, UserAddress, value_form
from wfm_ds.recipe.sections import (
    BasePrecision,
    EmaRecipe,
    EngineRecipe,
    LoraRecipe,
    ModelRecipe,
    RewardRecipe,
    RunRecipe,
)
from wfm_ds.types import Prompt

BASE_WEIGHTS, INITIAL_LORA = "base", "init"  # values of TeacherSettings.weights that are not files


def count_of_fraction(count: int, fraction: float) -> int:
    """Return max(1, floor(count * fraction)), corrected for float rounding: 50 * 0.58 gives 29, not 28."""
    return max(1, math.floor(count * fraction + 1e-9))


class RecipeSections(Protocol):
    """Recipe sections that `AlgorithmSettings.check_recipe` and `check_weights` may read."""

    run: RunRecipe
    data: DataRecipe
    sampling: SamplingRecipe
    ema: EmaRecipe | None
    model: ModelRecipe
    lora: LoraRecipe | None
    engine: EngineRecipe
    rollout: RolloutRecipe | None
    algorithm: AlgorithmSettings

    @property
    def rl(self) -> RlSections: ...

    @property
    def rollout_precision(self) -> BasePrecision | None: ...

    @property
    def forward_precision(self) -> BasePrecision | None: ...


class ModelProperties(Protocol):
    """Properties of a loaded model that `AlgorithmSettings.check_model` may read."""

    @property
    def family(self) -> str: ...

    @property
    def sigma_ranges(self) -> Sequence[tuple[float, float]]:
        """(lowest, highest) noise level of each expert. A model with a single denoiser has one entry."""

    def clean_frame_range(self, num_frames: tuple[int, int], /) -> tuple[int, int]:
        """Return the (min, max) number of conditioning latent frames that the model receives as clean latents.

        num_frames: (min, max) number of conditioning latent frames that the algorithm uses.
        """

    def flow_shift(self, sampling: SamplingRecipe, /) -> float:
        """Return the scheduler's timestep shift for this size and number of steps.

        Raises ModelError if the scheduler has no shift.
        """

    def stream_sizes(self, sampling: SamplingRecipe, /) -> Mapping[str, int]:
        """Return {stream: number of latent elements} of a sample with several streams, otherwise {}."""

    def check_sampling(self, sampling: SamplingRecipe, /) -> None:
        """Raise ModelError if the model does not support the sampling settings, such as guidance."""


class TeacherSettings(Section):
    """A teacher that the trained LoRA, the student, learns from. Teacher and student have the same base model."""

    weights: UserAddress = BASE_WEIGHTS
    """`base`: the base model without a LoRA. `init`: a frozen copy of `lora.init_from`. Otherwise the file
    or folder of a LoRA for the same base; its rank must not exceed `lora.rank`."""
    guidance_scale: Annotated[float, Field(ge=1)] = 1.0
    """Guidance scale of the teacher. The student learns the guided predictions and needs no guidance itself. 1: no
    guidance and no unconditional pass."""

    @property
    def has_lora(self) -> bool:
        return self.weights != BASE_WEIGHTS


class AdapterOptimizer(Section):
    """Optimizer keys of an additional LoRA that is trained but not exported."""

    lr: PositiveFloat | None = None
    """Learning rate, constant. Unset: `optimizer.lr`."""
    betas: tuple[Decay, Decay] = (0.0, 0.999)
    """Decay rates of the first and second moment."""


class AlgorithmSettings(Section):
    """Base class of all algorithm settings."""

    name: str
    """Selects the algorithm."""

    is_rl: ClassVar[bool] = False
    """True: trains on generated samples (reinforcement learning, distillation). False: supervised learning on data."""
    takes_prompts: ClassVar[bool] = False
    """Whether the algorithm can train on prompts (data.kind: prompts)."""
    takes_media: ClassVar[bool] = False
    """Whether the algorithm can train on captioned images or videos."""
    takes_conversations: ClassVar[bool] = False
    """Whether the algorithm trains on conversations (data.kind: llava)."""
    trains_language: ClassVar[bool] = False
    """Whether the algorithm trains a language model. Recipes for such algorithms have no section `sampling`."""
    reference_policies: ClassVar[tuple[str, ...]] = ()
    """Supervised algorithms: names of untrained policies that the loss needs, in the order of their forward passes."""
    takes_pairs: ClassVar[bool] = False
    """Whether the algorithm trains on preference pairs (data.kind: pairs)."""
    matches_flow: ClassVar[bool] = False
    """Whether the loss trains velocities on clean samples with added noise (flow matching), which undoes a distillation
    to few steps."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        """(min, max) number of conditioning frames, the first latent frames of a data sample."""
        return getattr(self, "min_num_conditional_frames", 0), getattr(self, "max_num_conditional_frames", 0)

    @property
    def uses_rewards(self) -> bool:
        return False

    @property
    def extra_adapters(self) -> Mapping[str, AdapterOptimizer]:
        """{adapter name: optimizer keys} of the LoRAs that are trained in addition to the exported LoRA."""
        return {}

    def list_teachers(self) -> Sequence[TeacherSettings]:
        return ()

    def list_lora_teachers(self) -> dict[str, TeacherSettings]:
        """Return {policy name: teacher} of the teachers with a LoRA. Teachers without a LoRA use the policy `ref`."""
        return {f"teacher_{i}": teacher for i, teacher in enumerate(self.list_teachers()) if teacher.has_lora}

    def check_recipe(self, recipe: RecipeSections) -> None:
        """Raise ValueError if these settings do not fit the other sections of the recipe."""

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        """Raise UserError if this algorithm cannot train `model` with these settings."""

    def check_streams(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        """Raise RecipeError if the algorithm cannot train a model with several streams, such as video and sound."""
        if streams := model.stream_sizes(sampling):
            raise RecipeError(
                f"algorithm {self.name} does not support {model.family} yet, which generates {' and '.join(streams)}: "
                "use sft, dpo, diffusion_nft or flow_grpo"
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError if this algorithm cannot train on these prompts."""

    def list_warnings(self) -> list[str]:
        return []

    @model_validator(mode="after")
    def _check_frame_range(self) -> AlgorithmSettings:
        low, high = self.conditioning_frame_range
        if low > high:
            raise ValueError(f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: swap them")
        return self


class StreamKeys(AlgorithmSettings):
    """Keys of algorithms that can train models of video with sound."""

    stream_weights: Annotated[
        Annotated[Literal["equal", "elements"], Tag("scalar")]
        | Annotated[dict[Literal["audio"], NonNegativeFloat], Tag("mapping")],
        Discriminator(value_form),
    ] = "equal"
    """LTX-2: weights of video and sound in losses and log-probabilities. `equal`: the mean of the two means.
    `elements`: the mean over all elements of the latents; the sound has about 2 % of them. A mapping such as `{audio:
    0.5}` sets the weight of the sound, if that of the video is 1. 0: train on the video only."""

    def check_streams(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        if self.non_default_keys("stream_weights") and not model.stream_sizes(sampling):
            raise RecipeError(f"algorithm.stream_weights: {model.family} generates no sound: remove the key")


class RolloutSettings(AlgorithmSettings):
    """Base class of algorithms that train on generated samples. It adds no keys."""

    is_rl = True
    takes_prompts = True
    implementation: ClassVar[str] = ""
    """The RlAlgorithm subclass as `package.module:Class`. Empty: `name` is the class path."""
    supports_async: ClassVar[bool] = True
    """Whether worker processes can generate rollouts (rollout.mode: async), with samples that may be a few RL steps
    old."""
    uses_edm_solvers: ClassVar[bool] = False
    """Whether the rollouts use the EDM solvers. Other algorithms cannot use them."""
    compares_log_probs: ClassVar[bool] = True
    """Whether log-probabilities of rollouts and training may be compared, so that both must round identically. If
    False, rollouts may use faster, slightly different kernels and weights."""
    reads_rollout_policy: ClassVar[bool] = False
    """Whether the algorithm uses the recipe key `rollout.policy`."""

    @property
    def advantages(self) -> AdvantageSettings | None:
        """The recipe keys that turn rewards into advantages, or None if the loss needs no rewards."""
        return None

    @property
    def uses_rewards(self) -> bool:
        return self.advantages is not None

    @property
    def num_selected(self) -> int | None:
        """Number of samples per group to train on: half of them the best samples, half the worst. None: all samples."""
        return None

    @property
    def drops_zero_std(self) -> bool:
        """Whether a group is dropped if all its samples have the same reward."""
        return False

    @property
    def num_updates(self) -> int:
        return self.num_sample_parts

    @property
    def num_sample_parts(self) -> int:
        """Number of equal parts of an RL step's samples. Each optimizer step trains on one part."""
        return 1

    def num_default_updates(self, num_steps: int) -> int:
        """Return the number of optimizer steps that train the exported weights in a run of `num_steps` RL steps."""
        return num_steps * self.num_updates

    @property
    def passes_per_term(self) -> int:
        """Number of forward and backward passes of the exported weights per loss term, except on data samples."""
        return 1

    def num_trained_samples(self, group_size: int) -> int:
        return self.num_selected or group_size

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        """Return the number of noise levels (loss terms) that each rollout sample is trained on."""
        raise NotImplementedError

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        return self.compares_log_probs

    def num_data_terms(self, num_terms: int) -> int:
        """Return the number of loss terms on data samples. num_terms: number of loss terms on rollout samples."""
        return 0

    def num_separate_data_terms(self, num_terms: int) -> int:
        """Return how many of the num_data_terms(num_terms) loss terms do not share a pass with rollout samples."""
        return 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        """Return which of the policies `old` and `ref` the loss or the rollouts use."""
        return frozenset()

    def check_recipe(self, recipe: RecipeSections) -> None:
        if self.advantages is not None:
            self.advantages.check_reward(recipe.rl.reward)
            if recipe.rl.rollout.group_size < 2:
                raise ValueError("rollout.group_size 1: advantages compare the samples of a prompt, set at least 2")
        self._check_solver(recipe.sampling.solver)
        if recipe.rl.rollout.history.clips:
            self._check_history(recipe)
        if recipe.rl.rollout.policy is not None and not self.reads_rollout_policy:
            raise ValueError(f"rollout.policy is only for algorithm ddrl, {self.name} has a fixed one: remove it")

    def _check_history(self, recipe: RecipeSections) -> None:
        rollout = recipe.rl.rollout
        key, max_chunk = (
            f"rollout.history.clips {rollout.history.clips}",
            min(recipe.engine.max_forward_batch, MAX_CHUNK),
        )
        if recipe.sampling.num_frames == 1:
            raise ValueError(f"{key} needs videos, but sampling.num_frames is 1: raise it, or remove rollout.history")
        if self.conditioning_frame_range[0] == 0:
            raise ValueError(f"{key} needs conditioning frames: set algorithm.min_num_conditional_frames above 0")
        if self.num_data_terms(self.terms_per_sample(recipe.sampling)) > 0:
            raise ValueError(
                f"{key} does not match the recorded clips, which algorithm {self.name} also trains on: set "
                "algorithm.data_beta: 0, or remove rollout.history"
            )
        if rollout.mode == "async" and rollout.group_size > max_chunk:
            raise ValueError(
                f"{key} with rollout.mode: async needs all samples of a group in one batch: rollout.group_size "
                f"{rollout.group_size} is above {max_chunk}, the smaller of engine.max_forward_batch and {MAX_CHUNK}"
            )

    def _check_solver(self, solver: str) -> None:
        if self.uses_edm_solvers and solver not in EDM_SOLVERS:
            raise ValueError(
                f"algorithm {self.name} does not support sampling.solver {solver}: set it to {' or '.join(EDM_SOLVERS)}"
            )
        if not self.uses_edm_solvers and solver in EDM_SOLVERS:
            raise ValueError(f"sampling.solver {solver} is only for algorithm ddrl, not {self.name}: choose another")


class RlSettings(AdvantageSettings, RolloutSettings):
    """Keys of all RL algorithms: how advantages are computed from rewards, and the number of updates per RL step."""

    zero_std: Literal["keep", "drop"] | None = None
    """Whether to train on groups in which all samples have the same reward and therefore the advantage 0. `keep`: train
    on these groups. `drop`: do not. Unset: `drop` if the loss depends only on the reward (such as diffusion_nft with
    `kl_beta: 0`), otherwise `keep`."""
    best_of_n: PositiveInt | None = None
    """Train only on this many samples per group: half of them the best samples, half the worst. Unset: all samples."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step. Each one trains on an equal part of the samples."""

    @property
    def advantages(self) -> AdvantageSettings:
        return self

    @property
    def num_selected(self) -> int | None:
        return self.best_of_n

    @property
    def num_sample_parts(self) -> int:
        return self.updates_per_rollout

    @property
    def has_regularizer(self) -> bool:
        """Whether the loss has terms in addition to the reward term, such as a distance to the reference policy."""
        return True

    @property
    def drops_zero_std(self) -> bool:
        return self.zero_std == "drop" or (self.zero_std is None and not self.has_regularizer)

    def check_recipe(self, recipe: RecipeSections) -> None:
        group_size = recipe.rl.rollout.group_size
        if self.best_of_n is not None and self.best_of_n > group_size:
            raise ValueError(f"algorithm.best_of_n {self.best_of_n} is more than rollout.group_size {group_size}")
        super().check_recipe(recipe)

    @model_validator(mode="after")
    def _check_selection(self) -> RlSettings:
        if self.best_of_n is not None and self.best_of_n % 2:
            raise ValueError(f"best_of_n {self.best_of_n} must be even: half are the best samples, half the worst")
        return self


class ConditioningFrameKeys(RolloutSettings):
    """Keys of algorithms that can condition generated samples on frames of the data set."""

    min_num_conditional_frames: NonNegativeInt = 0
    """Minimum number of conditioning frames: the first latent frames of a data sample, which all samples of a group
    continue. 0: none, 1: an image, 2: a video."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Maximum number of conditioning frames. The number is random for each group. Above 0, the data must be captioned
    images or videos; validation samples are conditioned on frames too."""

    @property
    def needs_media(self) -> bool:
        """Whether the run needs images or videos as data, to train on them or to condition samples on their frames."""
        return self.max_num_conditional_frames > 0

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.needs_media and recipe.data.kind == "prompts":
            key = "max_num_conditional_frames" if self.max_num_conditional_frames else "data_beta"
            raise ValueError(
                f"algorithm.{key} needs captioned images or videos, not data.kind: prompts: set data.kind: paired"
            )


class ConditioningFramesSettings(ConditioningFrameKeys, RlSettings):
    """Keys of RL algorithms that can condition generated samples on frames of the data set."""


class StreamSettings(StreamKeys, ConditioningFramesSettings):
    """Keys of RL algorithms that can train models of video with sound."""


@dataclass(frozen=True, slots=True)
class RlSections:
    """The sections that a recipe needs for training on generated samples, with the settings of its algorithm."""

    algorithm: RolloutSettings
    rollout: RolloutRecipe
    optional_reward: RewardRecipe | None

    @property
    def reward(self) -> RewardRecipe:
        """The section `reward`. Raises TypeError if the algorithm uses no rewards."""
        if self.optional_reward is None:
            raise TypeError(f"algorithm {self.algorithm.name} uses no rewards: check recipe.uses_rewards first")
        return self.optional_reward
