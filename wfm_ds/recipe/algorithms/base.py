"""Base classes of algorithm settings: shared recipe keys, and properties that describe an algorithm to other modules.

Other modules use these properties, never the algorithm's name. Settings are in a different package than the losses
(wfm_ds/algorithms), so that recipes can be validated without torch.
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
    """Return max(1, floor(count * fraction)), tolerating float rounding: 50 * 0.58 is slightly below 29."""
    return max(1, math.floor(count * fraction + 1e-9))


class RecipeSections(Protocol):
    """Recipe sections that `AlgorithmSettings.check_recipe` may read."""

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
    """Properties of a loaded model (models/base.py) that `AlgorithmSettings.check_model` may read."""

    @property
    def family(self) -> str: ...

    @property
    def sigma_ranges(self) -> Sequence[tuple[float, float]]:
        """(low, high) noise level of each expert; one entry for models without several experts."""

    def clean_frame_range(self, num_frames: tuple[int, int], /) -> tuple[int, int]:
        """Return the (min, max) number of conditioning latent frames that the model receives as clean latents.

        num_frames: (min, max) number of conditioning latent frames that the algorithm uses.
        """

    def flow_shift(self, sampling: SamplingRecipe, /) -> float:
        """Return the scheduler's timestep shift for this sample size and number of steps.

        Raises ModelError if the scheduler has no shift.
        """


class AlgorithmSettings(Section):
    """Base class of all algorithm settings."""

    name: str
    """Selects the algorithm."""

    is_rl: ClassVar[bool] = False
    """True: reinforcement learning on generated samples. False: supervised learning on data."""
    takes_prompts: ClassVar[bool] = False
    """Can train on prompts (data.kind: prompts)."""
    takes_media: ClassVar[bool] = False
    """Can train on captioned images or videos."""
    takes_conversations: ClassVar[bool] = False
    """Trains on conversations (data.kind: llava)."""
    trains_language: ClassVar[bool] = False
    """Trains a language model. Such recipes have no section `sampling`."""
    reference_policies: ClassVar[tuple[str, ...]] = ()
    """Supervised algorithms: names of untrained policies that the loss needs, in the order of their forward passes."""
    takes_pairs: ClassVar[bool] = False
    """Trains on preference pairs (data.kind: pairs)."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        """(min, max) number of conditioning frames. They are the first latent frames of a data sample."""
        return 0, 0

    def check_recipe(self, recipe: RecipeSections) -> None:
        """Raise ValueError if these settings do not fit the other sections of the recipe.

        Messages name keys as `section.key`.
        """

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        """Raise UserError if this algorithm cannot train `model` with these settings."""

    def list_warnings(self) -> list[str]:
        """Return a one-sentence warning for each valid but unusual setting."""
        return []


class RlSettings(AlgorithmSettings):
    """Keys of all RL algorithms: how rewards become advantages (algorithms/advantages.py)."""

    combine: Literal["sum", "mean", "gdpo"] = "sum"
    """How several rewards are combined. `sum`: compute one advantage from the weighted sum of the rewards. `mean`:
    compute an advantage per reward and take their weighted mean. `gdpo` (arXiv 2601.05242): compute an advantage per
    reward, take their weighted sum and normalize it over all samples."""
    advantage_std: Literal["group", "global", "none"] = "global"
    """Divisor of centred rewards: the standard deviation of the group, of all samples, or none."""
    std_unbiased: bool = False
    """Use the unbiased standard deviation (divide by n - 1), like some other trainers."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Transformation of clipped advantages. `positive_only`, `negative_only`: set advantages of the other sign to 0.
    `one_only`: 1 for positive advantages, 0 for the others. `binary`: only the sign."""
    zero_std: Literal["keep", "drop"] | None = None
    """Groups whose samples all have the same reward, so that the advantages are 0. `keep`: train on them. `drop`: do
    not. Unset: `drop` if the loss depends only on the reward (such as diffusion_nft with `kl_beta: 0`), else `keep`."""
    best_of_n: PositiveInt | None = None
    """Train only on this many samples per group: half of them the best, half the worst. Unset: all."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step. Each one trains on an equal part of the samples."""

    is_rl = True
    takes_prompts = True
    implementation: ClassVar[str] = ""
    """The RlAlgorithm subclass as `package.module:Class`. Empty: `name` is the class path."""
    supports_async: ClassVar[bool] = True
    """Supports rollouts in separate worker processes (rollout.mode: async), where samples may be a few RL steps old."""
    uses_edm_solvers: ClassVar[bool] = False
    """Its rollouts use the EDM solvers. Other algorithms cannot use them."""
    compares_log_probs: ClassVar[bool] = True
    """May compare log-probabilities of rollouts and training, so both must round identically. If False, rollouts may
    use faster, slightly different kernels and weights."""
    reads_rollout_policy: ClassVar[bool] = False
    """Reads the recipe key `rollout.policy`."""

    @property
    def has_regularizer(self) -> bool:
        """Whether the loss has terms in addition to the reward term, such as a distance to the reference policy.

        If so, samples with advantage 0 contribute to the gradient.
        """
        return True

    @property
    def drops_zero_std(self) -> bool:
        """Whether a group is dropped if all its samples have the same reward."""
        return self.zero_std == "drop" or (self.zero_std is None and not self.has_regularizer)

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        """Return the number of noise levels (loss terms) that each rollout sample is trained on."""
        raise NotImplementedError

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        """Return True if the loss uses log-probabilities that were computed during the rollout."""
        return self.compares_log_probs

    def num_data_terms(self, num_terms: int) -> int:
        """Return the number of loss terms on data samples that are added to `num_terms` terms on rollout samples."""
        return 0

    def num_separate_data_terms(self, num_terms: int) -> int:
        """Return the number of loss terms on data samples that have separate forward and backward passes.

        All other data terms (`num_data_terms`) share the passes of the rollout samples.
        """
        return 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        """Return the policies besides the trained one that the loss or the rollouts use: `old`, `ref`, both or none."""
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
    """Keys of RL algorithms that can condition generated samples on frames of the data set."""

    min_num_conditional_frames: NonNegativeInt = 0
    """Minimum number of conditioning frames: the first latent frames of a data sample, which all samples of a group
    continue. 0: none, 1: an image, 2: a video."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Maximum number of conditioning frames. The number is random for each group. Above 0, the data must be captioned
    images or videos; validation samples are conditioned on frames too."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

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
    """The sections of an RL recipe that other recipes do not have, and its algorithm settings."""

    algorithm: RlSettings
    rollout: RolloutRecipe
    reward: RewardRecipe
