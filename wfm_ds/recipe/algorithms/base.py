"""Base classes of algorithm settings: shared keys, and properties that describe an algorithm to the rest of the code.

Code outside of an algorithm uses these properties, never the algorithm's name. Settings are separate from the losses in
wfm_ds/algorithms so that recipes can be read and checked without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.sampling import EDM_SOLVERS, SamplingRecipe
from wfm_ds.recipe.section import Section
from wfm_ds.recipe.sections import (
    EmaRecipe,
    EngineRecipe,
    LoraRecipe,
    ModelRecipe,
    RewardRecipe,
    RolloutRecipe,
)


def count_of_fraction(count: int, fraction: float) -> int:
    """Return max(1, floor(count * fraction)), tolerant to binary rounding (50 * .58 is slightly below 29)."""
    return max(1, math.floor(count * fraction + 1e-9))


class RecipeSections(Protocol):
    """The other recipe sections that algorithm checks use."""

    @property
    def data(self) -> DataRecipe: ...

    @property
    def sampling(self) -> SamplingRecipe: ...

    @property
    def ema(self) -> EmaRecipe | None: ...

    @property
    def model(self) -> ModelRecipe: ...

    @property
    def lora(self) -> LoraRecipe | None: ...

    @property
    def engine(self) -> EngineRecipe: ...

    @property
    def rl(self) -> RlSections: ...


class ModelProperties(Protocol):
    """Properties of a loaded model that algorithms use (models/base.py)."""

    @property
    def family(self) -> str: ...

    @property
    def sigma_ranges(self) -> Sequence[tuple[float, float]]:
        """Noise level range (low, high) of each expert."""

    def clean_frame_range(self, num_frames: tuple[int, int], /) -> tuple[int, int]:
        """Return the (min, max) number of conditioning latent frames that stay clean in the model's input."""

    def flow_shift(self, sampling: SamplingRecipe, /) -> float:
        """Return the schedule shift for this size and number of steps. Raises ModelError if the model has none."""


class AlgorithmSettings(Section):
    """Base class of all algorithm settings."""

    name: str
    """Selects the algorithm."""

    is_rl: ClassVar[bool] = False
    """True: reinforcement learning on generated samples. False: supervised learning on data."""
    takes_prompts: ClassVar[bool] = False
    """Whether it can train on prompts (data.kind: prompts)."""
    takes_media: ClassVar[bool] = False
    """Whether it can train on captioned images or videos."""
    takes_conversations: ClassVar[bool] = False
    """Whether it trains on conversations (data.kind: llava)."""
    trains_language: ClassVar[bool] = False
    """Whether it trains a language model. Such recipes have no section `sampling`."""
    reference_policies: ClassVar[tuple[str, ...]] = ()
    """Supervised: additional policies that the loss needs, in the order of their forward passes."""
    takes_pairs: ClassVar[bool] = False
    """Whether it trains on preference pairs (data.kind: pairs)."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        """Minimum and maximum number of latent frames of the data that a sample is conditioned on."""
        return 0, 0

    def check_recipe(self, recipe: RecipeSections) -> None:
        """Raise ValueError if these settings do not fit the other sections. Messages name keys as `section.key`."""

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        """Raise UserError if this algorithm cannot train the model with these settings."""

    def list_warnings(self) -> list[str]:
        """Return one sentence per setting that is valid but probably a mistake."""
        return []


class RlSettings(AlgorithmSettings):
    """Keys of all RL algorithms: how rewards become advantages (algorithms/advantages.py)."""

    combine: Literal["sum", "mean", "gdpo"] = "sum"
    """How several rewards are combined. `sum`: one advantage of the weighted sum. `mean`: weighted mean of one
    advantage per reward. `gdpo` (arXiv 2601.05242): weighted sum of one advantage per reward, normalized over all
    samples."""
    advantage_std: Literal["group", "global", "none"] = "global"
    """Divisor of centred rewards: the standard deviation of the group, of all samples, or none."""
    std_unbiased: bool = False
    """Use the unbiased standard deviation (divide by n - 1), like some other trainers."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Transformation of clipped advantages. `positive_only`, `negative_only`: set the others to 0. `one_only`: 1 for
    positive advantages, 0 for the others. `binary`: only the sign."""
    zero_std: Literal["keep", "drop"] | None = None
    """Groups with equal rewards (advantage 0). `keep`: train on them. `drop`: do not. Unset: `drop` if the loss
    consists of the reward term only (diffusion_nft with `kl_beta: 0`), else `keep`."""
    best_of_n: PositiveInt | None = None
    """Train only on this many samples per group: half of them the best, half the worst. Unset: all."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step. The samples are split among them."""

    is_rl = True
    takes_prompts = True
    implementation: ClassVar[str] = ""
    """The subclass of RlAlgorithm, as `package.module:Class`. Empty: `name` is this class."""
    supports_async: ClassVar[bool] = True
    """Whether separate workers may generate its samples, which may be a few RL steps old."""
    uses_edm_solvers: ClassVar[bool] = False
    """Whether its rollouts use the EDM solvers. Other algorithms cannot use them."""
    compares_log_probs: ClassVar[bool] = True
    """Whether it may compare rollout and training log-probabilities. If so, rollouts must round exactly like training.
    If not, samples may come from any source."""
    reads_rollout_policy: ClassVar[bool] = False
    """Whether it reads `rollout.policy`."""

    @property
    def has_regularizer(self) -> bool:
        """Whether the loss has terms besides the reward, such as a distance to the reference. Samples with advantage 0
        then contribute to the gradient."""
        return True

    @property
    def drops_zero_std(self) -> bool:
        """Whether groups with equal rewards are dropped."""
        return self.zero_std == "drop" or (self.zero_std is None and not self.has_regularizer)

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        """Return the number of noise levels that each sample of an RL step is trained on."""
        raise NotImplementedError

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        """Return whether the loss uses log-probabilities computed in the rollout."""
        return self.compares_log_probs

    def num_data_terms(self, num_terms: int) -> int:
        """Return the number of data samples trained on together with this many loss terms."""
        return 0

    def num_separate_data_terms(self, num_terms: int) -> int:
        """Return how many of these loss terms process their data sample in a separate forward and backward pass."""
        return 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        """Return the weight copies used in the loss or rollout: a subset of `old` and `ref`."""
        return frozenset()

    def check_recipe(self, recipe: RecipeSections) -> None:
        self._check_advantages(recipe.rl.rollout, recipe.rl.reward)
        self._check_solver(recipe.sampling.solver)
        if recipe.rl.rollout.policy is not None and not self.reads_rollout_policy:
            raise ValueError(
                f"rollout.policy is only for algorithm ddrl, {self.name} has a fixed rollout policy: remove it"
            )

    def _check_advantages(self, rollout: RolloutRecipe, reward: RewardRecipe) -> None:
        if self.best_of_n is not None and self.best_of_n > rollout.group_size:
            raise ValueError(
                f"algorithm.best_of_n {self.best_of_n} is more than rollout.group_size {rollout.group_size}"
            )
        if self.combine != "sum" and (reward.clip is not None or reward.scale != 1):
            raise ValueError(
                f"algorithm.combine: {self.combine} does not use the weighted sum that reward.clip and reward.scale "
                "act on: remove them, or set clip in reward.functions"
            )

    def _check_solver(self, solver: str) -> None:
        if self.uses_edm_solvers and solver not in EDM_SOLVERS:
            raise ValueError(
                f"algorithm {self.name} does not support sampling.solver {solver}: set it to {' or '.join(EDM_SOLVERS)}"
            )
        if not self.uses_edm_solvers and solver in EDM_SOLVERS:
            raise ValueError(
                f"sampling.solver {solver} is only for algorithm ddrl, not {self.name}: choose another one"
            )

    @model_validator(mode="after")
    def _check_normalization(self) -> RlSettings:
        if self.best_of_n is not None and self.best_of_n % 2:
            raise ValueError(f"best_of_n {self.best_of_n} must be even: half are the best samples, half the worst")
        if self.combine == "gdpo" and self.advantage_std != "group":
            raise ValueError("combine: gdpo normalizes each reward within its group: set advantage_std: group")
        return self


class ConditioningFramesSettings(RlSettings):
    """Keys of RL algorithms that can condition samples on frames of the data (models/conditional_frames.py)."""

    min_num_conditional_frames: NonNegativeInt = 0
    """Minimum number of conditioning frames: first latent frames of a data sample that a group of rollouts continues.
    They stay clean and are excluded from the loss. 0: none, 1: an image, 2: a video."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Maximum number of conditioning frames; a random number is used for each group. If above 0, the data must be
    captioned images or videos, and validation samples are conditioned too."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    @property
    def needs_media(self) -> bool:
        """Whether samples are conditioned on data frames, or the data is trained on."""
        return self.max_num_conditional_frames > 0

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.needs_media and recipe.data.kind == "prompts":
            key = "max_num_conditional_frames" if self.max_num_conditional_frames else "data_beta"
            raise ValueError(
                f"algorithm.{key} needs captioned images or videos, not data.kind: prompts: set data.kind: paired"
            )

    @model_validator(mode="after")
    def _check_frame_range(self) -> ConditioningFramesSettings:
        low, high = self.conditioning_frame_range
        if low > high:
            raise ValueError(
                f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: raise the maximum"
            )
        return self


@dataclass(frozen=True, slots=True)
class RlSections:
    """The sections that only RL recipes have."""

    algorithm: RlSettings
    rollout: RolloutRecipe
    reward: RewardRecipe
