"""Settings of DDRL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.algorithms.base import ConditioningFramesSettings, ModelProperties, RecipeSections
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.recipe.sampling import SamplingRecipe


class DdrlAlgorithm(ConditioningFramesSettings):
    """DDRL (arXiv 2512.04332): policy gradient on churned EDM rollouts, regularized by a diffusion loss on data."""

    name: Literal["ddrl"]
    """Selects this algorithm."""
    combine: Literal["sum", "mean", "gdpo"] = "mean"
    """How several rewards are combined. `sum`: compute one advantage from the weighted sum of the rewards. `mean`:
    compute an advantage per reward and take the mean of weight * advantage. `gdpo` (arXiv 2601.05242): compute an
    advantage per reward and normalize their weighted sum over all samples."""
    advantage_std: Literal["group", "global", "none"] = "group"
    """Divisor of the rewards after the mean of the group is subtracted. `group`: standard deviation of the group.
    `global`: standard deviation of all samples. `none`: no division."""
    updates_per_rollout: Literal[1] = 1
    """Optimizer steps per RL step. Always 1."""
    train_on: list[Annotated[int, Field(ge=-1)]] = Field([0, 1, 2, 3], min_length=1)
    """Denoising steps that every sample is trained on. 0 is the first step. The last step has no noise and is not
    allowed. -1: one more step, random in each RL step."""
    ratio_norm: Literal["gaussian", "literal", "std_scaled"] = "gaussian"
    """Divisor of the squared distances between a sample and the means of a denoising step, in the log-ratio of two
    policies. s is the standard deviation of the step. `gaussian`: 2 s^2, which emphasizes low noise. `literal`: 1, as
    in the published runs, which emphasizes high noise. `std_scaled`: 2 s. Tune `clip_ratio` and `data_beta` for
    each."""
    clip_ratio: PositiveFloat = 1e-4
    """PPO clip range: probability ratios are clipped to 1 - clip_ratio .. 1 + clip_ratio."""
    kl_beta: NonNegativeFloat = 0.01
    """Weight of the KL divergence to the reference policy on rollout samples. 0: no reference forward pass."""
    update_ref_every: NonNegativeInt = 0
    """RL steps between copies of the trained weights to the reference policy, which starts with the initial weights.
    0: never copy."""
    data_beta: NonNegativeFloat = 0.0
    """Weight of the diffusion loss on data. If above 0, the data must be captioned images or videos, and their captions
    are the prompts."""
    use_rl_sigma_and_noise: bool = True
    """Noise added to the data. True: the noise level of the trained rollout step and the initial noise of the rollout.
    False: a noise level from the base model's training density and independent noise."""
    data_on_first_only: bool = False
    """Compute the diffusion loss only at the first trained step. The loss is still averaged over all trained steps."""
    data_forward: Literal["joint", "separate"] = "joint"
    """How rollout states and noisy data are trained on. `joint`: in the same forward and backward pass. `separate`: in
    separate passes, with the same gradient and less activation memory, but twice as many passes."""
    exp_reward: bool = False
    """Replace the advantage A by exp_reward_baseline - exp(-A)."""
    exp_reward_baseline: NonNegativeFloat = 0.0
    """Baseline of `exp_reward`. 1 reduces the variance without changing the mean gradient."""
    loss_scale: PositiveFloat = 1.0
    """Factor of the total loss. It changes the effect of `engine.max_grad_norm`. Without gradient clipping, Adam's
    updates do not depend on it."""

    implementation = "wfm_ds.algorithms.ddrl:Ddrl"
    takes_media = True
    compares_log_probs = False  # it only compares log-probabilities that training itself computes
    uses_edm_solvers = True
    reads_rollout_policy = True

    @property
    def needs_media(self) -> bool:
        return self.data_beta > 0 or super().needs_media

    @property
    def reference_policy(self) -> str:
        """Name of the reference policy in the engine: `old` if it is updated during training, otherwise `ref`."""
        return "old" if self.update_ref_every else "ref"

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return len(self.train_on)

    def num_data_terms(self, num_terms: int) -> int:
        if self.data_beta == 0:
            return 0
        return num_terms // len(self.train_on) if self.data_on_first_only else num_terms

    def num_separate_data_terms(self, num_terms: int) -> int:
        return self.num_data_terms(num_terms) if self.data_forward == "separate" else 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        needed = self.kl_beta > 0 or rollout.policy == "reference"
        return frozenset({self.reference_policy} if needed else ())

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        rollout = recipe.rl.rollout
        moves = rollout.policy != "reference" or self.update_ref_every > 0
        if rollout.mode == "async" and rollout.max_staleness > 0 and moves:
            raise ValueError(
                "algorithm ddrl needs on-policy samples unless the rollout policy is fixed: set "
                "rollout.max_staleness: 0"
            )
        last = recipe.sampling.steps - 1
        if max(self.train_on) >= last:
            raise ValueError(
                f"algorithm.train_on {self.train_on} must be at most {last - 1} with sampling.steps {last + 1}: the "
                "last step has no noise"
            )
        if self.update_ref_every and not self.kl_beta and recipe.rl.rollout.policy != "reference":
            raise ValueError(
                "algorithm.update_ref_every updates a reference policy that is not used: set algorithm.kl_beta or "
                "rollout.policy: reference, or remove it"
            )
        if self.data_beta and recipe.sampling.guidance_scale != 1:
            raise ValueError(
                f"algorithm.data_beta trains predictions without guidance, but sampling.guidance_scale is "
                f"{recipe.sampling.guidance_scale:g}: set it to 1, or data_beta to 0"
            )

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        """Raise RecipeError if a data sample and its rollout step may need different experts."""
        if self.data_beta > 0 and not self.use_rl_sigma_and_noise and len(model.sigma_ranges) > 1:
            raise RecipeError(
                f"algorithm.use_rl_sigma_and_noise: false may select a different expert of {model.family} than the "
                "rollout step: set it to true"
            )

    def list_warnings(self) -> list[str]:
        if self.data_beta > 0:
            return []
        return [
            "algorithm ddrl without algorithm.data_beta is not regularized by data: only algorithm.kl_beta limits the "
            "policy"
        ]

    @model_validator(mode="after")
    def _check_settings(self) -> DdrlAlgorithm:
        if len(set(self.train_on)) != len(self.train_on):
            raise ValueError(f"train_on has a duplicate step: {self.train_on}")
        about_data = self.data_on_first_only or not self.use_rl_sigma_and_noise or self.data_forward == "separate"
        if self.data_beta == 0 and about_data:
            raise ValueError(
                "data_on_first_only, use_rl_sigma_and_noise and data_forward need a diffusion loss, but data_beta is "
                "0: remove them, or raise data_beta"
            )
        if self.exp_reward_baseline and not self.exp_reward:
            raise ValueError("exp_reward_baseline is only read with exp_reward: true")
        if self.exp_reward and self.exp_reward_baseline == 0 and self.adv_mode in ("positive_only", "one_only"):
            raise ValueError(
                f"exp_reward makes all advantages negative, and adv_mode: {self.adv_mode} drops these: set "
                "exp_reward_baseline"
            )
        return self
