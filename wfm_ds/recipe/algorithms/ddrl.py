"""The settings of DDRL; its mathematics: algorithms/ddrl.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.base import GivenFramesSettings, ModelFacts, OtherSections
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.sections import RolloutRecipe


class DdrlAlgorithm(GivenFramesSettings):
    """DDRL (arXiv 2512.04332): policy gradients on churned EDM rollouts, held to the data by a diffusion loss."""

    name: Literal["ddrl"]
    """Selects this algorithm."""
    combine: Literal["sum", "mean", "gdpo"] = "mean"
    """Several rewards: `mean` makes an advantage of each and averages them with their weights; `sum` compares their
    weighted sum; `gdpo` (arXiv 2601.05242) adds them with their weights and normalises the result over all samples."""
    advantage_std: Literal["group", "global", "none"] = "group"
    """What the centred reward is divided by: the standard deviation of its group, of all samples, or nothing."""
    updates_per_rollout: Literal[1] = 1
    """Optimizer steps per RL step: always one."""
    train_on: list[Annotated[int, Field(ge=-1)]] = Field([0, 1, 2, 3], min_length=1)
    """Denoise steps that every sample is trained on; 0 is the first, and the last one has no noise to train on. -1
    stands for one more, drawn anew for each RL step."""
    ratio_norm: Literal["gaussian", "literal", "std_scaled"] = "gaussian"
    """What an outcome's squared distances to the means of two policies are divided by, s^2 being the variance:
    `gaussian` 2 s^2; `literal` 1, as in the published runs; `std_scaled` 2 s. Low noise counts most with the first,
    high noise with the second; each needs a clip_ratio and a data_beta of its own."""
    clip_ratio: PositiveFloat = 1e-4
    """Probability ratios are clipped to 1 - clip_ratio .. 1 + clip_ratio."""
    kl_beta: NonNegativeFloat = 0.01
    """Weight of the distance to the reference policy on the rollouts. 0 runs no reference forward for it."""
    update_ref_every: NonNegativeInt = 0
    """RL steps after which the trained weights become the reference, beginning with the first. 0: never."""
    data_beta: NonNegativeFloat = 0.0
    """Weight of the diffusion loss on the data. Above 0 the prompts are the captions of a paired data set."""
    use_rl_sigma_and_noise: bool = True
    """The data is noised like the rollout: with its noise level at the trained step and its initial noise. False: by a
    noise level of the base model's training density and noise of its own."""
    data_on_first_only: bool = False
    """Compute the diffusion loss at the first trained step only (its weight stays one part of all trained steps)."""
    data_forward: Literal["joint", "separate"] = "joint"
    """`joint`: rollout states and noisy data go through the denoiser in one forward. `separate`: the data has a forward
    and backward of its own in the same optimizer step, so that the activations of only one of the two are kept. The
    gradient is the same; it takes less memory, and twice as many forwards of half the size."""
    exp_reward: bool = False
    """Train on exp_reward_baseline - exp(-A) in place of the advantage A."""
    exp_reward_baseline: NonNegativeFloat = 0.0
    """What exp(-A) is taken from. 1 lowers the variance and keeps the mean."""
    loss_scale: PositiveFloat = 1.0
    """Factor of the whole loss: it moves the threshold of engine.max_grad_norm, Adam ignores it."""

    implementation = "wfm_ds.algorithms.ddrl:Ddrl"
    takes_media = True
    compares_log_probs = False  # with those of the weights at the start of the step, which training computes
    samples_in_edm = True
    chooses_policy = True

    @property
    def needs_media(self) -> bool:
        return self.data_beta > 0 or super().needs_media

    @property
    def reference(self) -> str:
        """The engine's name of the reference policy: one that moves is a copy like `old`, `ref` is frozen."""
        return "old" if self.update_ref_every else "ref"

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return len(self.train_on)

    def num_data(self, num_terms: int) -> int:
        if self.data_beta == 0:
            return 0
        return num_terms // len(self.train_on) if self.data_on_first_only else num_terms

    def num_divided(self, num_terms: int) -> int:
        return self.num_data(num_terms) if self.data_forward == "separate" else 0

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        needed = self.kl_beta > 0 or rollout.policy == "reference"
        return frozenset({self.reference} if needed else ())

    def check(self, recipe: OtherSections) -> None:
        super().check(recipe)
        rollout = recipe.rl.rollout
        moves = rollout.policy != "reference" or self.update_ref_every > 0
        if rollout.mode == "async" and rollout.max_staleness > 0 and moves:
            raise ValueError(
                "algorithm ddrl compares its samples with the policy as it is, and that moves: set "
                "rollout.max_staleness: 0"
            )
        last = recipe.sampling.steps - 1
        if max(self.train_on) >= last:
            raise ValueError(
                f"algorithm.train_on {self.train_on} may go to {last - 1} when sampling.steps is {last + 1}: the "
                "last step has no noise to train on"
            )
        if self.update_ref_every and not self.kl_beta and recipe.rl.rollout.policy != "reference":
            raise ValueError(
                "algorithm.update_ref_every moves a reference that nothing reads: set algorithm.kl_beta or "
                "rollout.policy: reference, or remove it"
            )
        if self.data_beta and recipe.sampling.guidance_scale != 1:
            raise ValueError(
                f"algorithm.data_beta trains the prediction without guidance, and sampling.guidance_scale "
                f"{recipe.sampling.guidance_scale:g} asks for another: set it to 1, or data_beta to 0"
            )

    def check_model(self, model: ModelFacts, sampling: SamplingRecipe) -> None:
        """Refuse data that would be noised for another expert than the rollout step that it is trained with."""
        if self.data_beta > 0 and not self.use_rl_sigma_and_noise and len(model.sigma_ranges) > 1:
            raise RecipeError(
                f"algorithm.use_rl_sigma_and_noise: false draws noise levels that {model.family} denoises with another "
                "expert than the rollout's: set it to true"
            )

    def doubts(self) -> list[str]:
        if self.data_beta > 0:
            return []
        return [
            "algorithm ddrl without algorithm.data_beta has no data to hold the policy to: it is a policy gradient "
            "with algorithm.kl_beta as its only restraint"
        ]

    @model_validator(mode="after")
    def _consistent(self) -> DdrlAlgorithm:
        if len(set(self.train_on)) != len(self.train_on):
            raise ValueError(f"train_on names a step twice: {self.train_on}")
        about_data = self.data_on_first_only or not self.use_rl_sigma_and_noise or self.data_forward == "separate"
        if self.data_beta == 0 and about_data:
            raise ValueError(
                "data_on_first_only, use_rl_sigma_and_noise and data_forward are about the diffusion loss, which "
                "data_beta: 0 leaves out: remove them, or raise data_beta"
            )
        if self.exp_reward_baseline and not self.exp_reward:
            raise ValueError("exp_reward_baseline is only read with exp_reward: true")
        if self.exp_reward and self.exp_reward_baseline == 0 and self.adv_mode in ("positive_only", "one_only"):
            raise ValueError(
                f"exp_reward makes all advantages negative, and adv_mode: {self.adv_mode} leaves none of them: set an "
                "exp_reward_baseline"
            )
        return self
