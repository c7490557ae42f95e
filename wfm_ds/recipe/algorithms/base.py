"""The common part of every algorithm's section of a recipe: its keys, and the facts that it states about itself.

Whoever needs to know something about the algorithm of a run asks these properties and methods, never its name. The
settings stand in recipe/ and the mathematics of the same name in algorithms/, because a recipe is read, checked and
described on machines and in processes that do not load torch.
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


def num_of_share(count: int, share: float) -> int:
    """max(1, floor(count * share)), of the share as it was written: in binary 50 * .58 is a little below 29."""
    return max(1, math.floor(count * share + 1e-9))


class OtherSections(Protocol):
    """The rest of the recipe, as far as an algorithm's rules are about it."""

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


class ModelFacts(Protocol):
    """The facts that a loaded model states about itself (models/base.py)."""

    @property
    def family(self) -> str: ...

    @property
    def sigma_ranges(self) -> Sequence[tuple[float, float]]:
        """The noise levels of each expert."""

    def pinned(self, num_frames: tuple[int, int], /) -> tuple[int, int]:
        """The part of a range of given first latent frames that is no noise."""

    def flow_shift(self, sampling: SamplingRecipe, /) -> float:
        """The shift of its schedule at this size and number of steps. Raises ModelError where it has none."""


class AlgorithmSettings(Section):
    """The section `algorithm` of a recipe."""

    name: str
    """Selects the algorithm."""

    is_rl: ClassVar[bool] = False
    """True: it learns from rewards of its own samples. False: from data alone."""
    takes_prompts: ClassVar[bool] = False
    """True if it can train on prompts (data.kind: prompts)."""
    takes_media: ClassVar[bool] = False
    """True if it can train on captioned media (any other data.kind but pairs)."""
    takes_conversations: ClassVar[bool] = False
    """True if it can train on conversations (data.kind: llava)."""
    trains_language: ClassVar[bool] = False
    """True if it trains a language model, whose recipe has no section `sampling`."""
    references: ClassVar[tuple[str, ...]] = ()
    """Supervised: policies besides the trained one that the loss needs, in the order of their forwards."""
    takes_pairs: ClassVar[bool] = False
    """True if it trains on pairs of media of which one is preferred (data.kind: pairs)."""

    @property
    def num_conditional_frames(self) -> tuple[int, int]:
        """The smallest and the largest number of latent frames of the data that a sample is given."""
        return 0, 0

    def check(self, recipe: OtherSections) -> None:
        """Raise ValueError for what does not fit the other sections, naming keys as `section.key`."""

    def check_model(self, model: ModelFacts, sampling: SamplingRecipe) -> None:
        """Raise UserError for a model that this algorithm, with these settings, cannot train."""

    def doubts(self) -> list[str]:
        """Name what is possible but probably not meant, a sentence each."""
        return []


class RlSettings(AlgorithmSettings):
    """The keys of every reinforcement learning algorithm: how rewards become advantages (algorithms/advantages.py)."""

    combine: Literal["sum", "mean", "gdpo"] = "sum"
    """Several rewards: `sum` compares their weighted sum; `mean` makes an advantage of each and averages them with
    their weights; `gdpo` (arXiv 2601.05242) adds them with their weights and normalises the result over all samples."""
    advantage_std: Literal["group", "global", "none"] = "global"
    """What the centred reward is divided by: the standard deviation of its group, of all samples, or nothing."""
    std_unbiased: bool = False
    """Divide by n - 1 in these standard deviations, to reproduce trainers that do."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Which advantages train, after clipping."""
    zero_std: Literal["keep", "drop"] | None = None
    """A group whose rewards are all equal has the advantage 0: `keep` trains it with that, `drop` does not train it.
    Unset: `drop` where the loss has no part beside the reward's (diffusion_nft with kl_beta 0), else `keep`."""
    best_of_n: PositiveInt | None = None
    """Train only this many samples of a group: half of them its best, half its worst. Unset: all."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step; the samples are split among them."""

    is_rl = True
    takes_prompts = True
    implementation: ClassVar[str] = ""
    """The class that computes it, a subclass of RlAlgorithm, as `package.module:Class`. Empty: `name` is that."""
    may_be_async: ClassVar[bool] = True
    """True if other processes may generate its samples, which may then be some RL steps old."""
    samples_in_edm: ClassVar[bool] = False
    """True if it rolls out with the EDM solvers, which other algorithms cannot use."""
    compares_log_probs: ClassVar[bool] = True
    """True if it may compare log-probabilities of a rollout with those of training: then rollouts and rollout workers
    must compute and round as training does. False: its samples may come from anywhere."""
    chooses_policy: ClassVar[bool] = False
    """True if it reads rollout.policy."""

    @property
    def regularizes(self) -> bool:
        """The loss has a part beside the reward's, such as a distance to the reference, for which samples of advantage
        0 are worth training on."""
        return True

    @property
    def drops_zero_std(self) -> bool:
        """Groups whose rewards are all equal are not trained on."""
        return self.zero_std == "drop" or (self.zero_std is None and not self.regularizes)

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        """Noise levels that each sample of an RL step is trained on."""
        raise NotImplementedError

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        """The loss reads log-probabilities that the rollout computed, which must be those of the trained policy."""
        return self.compares_log_probs

    def num_data(self, num_terms: int) -> int:
        """Samples of data that are trained on beside this many terms."""
        return 0

    def num_divided(self, num_terms: int) -> int:
        """The number of these terms that have their data in a forward and backward of its own."""
        return 0

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        """Copies of the weights that it compares or rolls out with: of `old` and `ref`."""
        return frozenset()

    def check(self, recipe: OtherSections) -> None:
        self._advantages_fit(recipe.rl.rollout, recipe.rl.reward)
        self._solver_fits(recipe.sampling.solver)
        if recipe.rl.rollout.policy is not None and not self.chooses_policy:
            raise ValueError(
                f"rollout.policy is read by algorithm ddrl only: {self.name} knows its policy, remove the key"
            )

    def _advantages_fit(self, rollout: RolloutRecipe, reward: RewardRecipe) -> None:
        if self.best_of_n is not None and self.best_of_n > rollout.group_size:
            raise ValueError(
                f"algorithm.best_of_n {self.best_of_n} is more than rollout.group_size {rollout.group_size}"
            )
        if self.combine != "sum" and (reward.clip is not None or reward.scale != 1):
            raise ValueError(
                f"reward.clip and reward.scale act on the weighted sum, which algorithm.combine: {self.combine} "
                "does not use: remove them, or set clip in reward.functions"
            )

    def _solver_fits(self, solver: str) -> None:
        if self.samples_in_edm and solver not in EDM_SOLVERS:
            raise ValueError(
                f"algorithm {self.name} rolls out with {' or '.join(EDM_SOLVERS)}: sampling.solver {solver} is for "
                "other ones"
            )
        if not self.samples_in_edm and solver in EDM_SOLVERS:
            raise ValueError(f"sampling.solver {solver} is for algorithm ddrl; {self.name} needs another one")

    @model_validator(mode="after")
    def _comparable(self) -> RlSettings:
        if self.best_of_n is not None and self.best_of_n % 2:
            raise ValueError(f"best_of_n {self.best_of_n} takes as many best as worst samples: make it even")
        if self.combine == "gdpo" and self.advantage_std != "group":
            raise ValueError("combine: gdpo normalises each reward within its group: set advantage_std: group")
        return self


class GivenFramesSettings(RlSettings):
    """The keys of algorithms whose samples may be given frames of the data (models/conditional_frames.py)."""

    min_num_conditional_frames: NonNegativeInt = 0
    """Smallest number of first latent frames of its medium that a group of rollouts is given, clean and outside the
    loss: 0 none, 1 an image, 2 a video."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Largest such number; one is drawn for each group. Above 0 the data is captioned media, and validation draws begin
    with frames too."""

    @property
    def num_conditional_frames(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    @property
    def needs_media(self) -> bool:
        """These settings give samples frames of the data, or train on it."""
        return self.max_num_conditional_frames > 0

    def check(self, recipe: OtherSections) -> None:
        super().check(recipe)
        if self.needs_media and recipe.data.kind == "prompts":
            key = "max_num_conditional_frames" if self.max_num_conditional_frames else "data_beta"
            raise ValueError(
                f"algorithm.{key} needs captioned media, and data.kind: prompts has texts alone: set data.kind: paired"
            )

    @model_validator(mode="after")
    def _ordered_frames(self) -> GivenFramesSettings:
        low, high = self.num_conditional_frames
        if low > high:
            raise ValueError(f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: raise it")
        return self


@dataclass(frozen=True, slots=True)
class RlSections:
    """The sections that a recipe of reinforcement learning has and any other lacks."""

    algorithm: RlSettings
    rollout: RolloutRecipe
    reward: RewardRecipe
