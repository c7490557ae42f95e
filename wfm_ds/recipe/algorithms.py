"""The recipe's `algorithm` section: one class for each algorithm, told apart by `name`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.section import Decay, Section


def num_of_share(count: int, share: float) -> int:
    """max(1, floor(count * share)), of the share as it was written: in binary 50 * .58 is a little below 29."""
    return max(1, math.floor(count * share + 1e-9))


class SftAlgorithm(Section):
    """Supervised fine-tuning: velocity matching on data."""

    name: Literal["sft"]
    """Selects this algorithm."""
    timestep_density: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """Density of the noise level before the shift. More noise for a larger mean."""
    logit_mean: float = 0.0
    """logit_normal: mean of logit(q)."""
    logit_std: PositiveFloat = 1.0
    """logit_normal: standard deviation of logit(q)."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """mode: the scale of SD3's mode density."""
    flow_shift: PositiveFloat | None = None
    """sigma = shift * q / (1 + (shift - 1) * q). Unset: the shift of the pipeline's scheduler."""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "edm", "min_snr"] = "none"
    """Weight of the velocity error by noise level."""
    stratified: bool = False
    """Spread the noise levels of a global batch evenly over the density instead of drawing them independently."""
    min_num_conditional_frames: NonNegativeInt = 0
    """Video families that can continue a video: at least so many first latent frames are given, clean and outside the
    loss (0: text to video, 1: image to video, 2: video to video; n latent frames are 1 + 4 * (n - 1) pixel frames)."""
    max_num_conditional_frames: NonNegativeInt = 0
    """At most so many. The number is drawn anew for each sample and epoch, each with the same chance."""

    @model_validator(mode="after")
    def _ordered_frames(self) -> SftAlgorithm:
        low, high = self.min_num_conditional_frames, self.max_num_conditional_frames
        if low > high:
            raise ValueError(f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: raise it")
        return self

    @model_validator(mode="after")
    def _all_read(self) -> SftAlgorithm:
        if self.timestep_density != "logit_normal":
            self.require_default("logit_mean", "logit_std", unless="timestep_density: logit_normal")
        if self.timestep_density != "mode":
            self.require_default("mode_scale", unless="timestep_density: mode")
        return self


class DecaySchedule(Section):
    """Decay of the old policy after optimizer step j: `initial` while j < flat_steps, then up by `slope` to `max`."""

    flat_steps: NonNegativeInt = 0
    """Steps before the rise."""
    initial: Decay = 0.0
    """Decay at first; 0 copies the trained weights."""
    slope: NonNegativeFloat = 0.001
    """Rise per optimizer step."""
    max: Decay = 0.5
    """Upper bound."""

    @model_validator(mode="after")
    def _rising(self) -> DecaySchedule:
        if self.initial > self.max:
            raise ValueError(f"initial {self.initial} is above max {self.max}: raise max")
        return self


class RlSettings(Section):
    """What every reinforcement learning algorithm makes of the rewards of an RL step (algorithms/advantages.py)."""

    name: str
    """Selects the algorithm."""
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
    zero_std: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all equal has the advantage 0: `keep` trains it with that, `drop` does not train it."""
    best_of_n: PositiveInt | None = None
    """Train only this many samples of a group: half of them its best, half its worst. Unset: all."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer steps per RL step; the samples are split among them."""

    def num_trained_timesteps(self, sampling: SamplingRecipe) -> int:
        """Noise levels that each sample of an RL step is trained on."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _comparable(self) -> RlSettings:
        if self.best_of_n is not None and self.best_of_n % 2:
            raise ValueError(f"best_of_n {self.best_of_n} takes as many best as worst samples: make it even")
        if self.combine == "gdpo" and self.advantage_std != "group":
            raise ValueError("combine: gdpo normalises each reward within its group: set advantage_std: group")
        return self


class NftAlgorithm(RlSettings):
    """DiffusionNFT (arXiv 2509.16117): forward-process reinforcement learning, no log-probabilities."""

    name: Literal["diffusion_nft"]
    """Selects this algorithm."""
    beta: PositiveFloat = 1.0
    """Mixing of trained and old velocity in the implicit positive and negative policies."""
    kl_beta: NonNegativeFloat = 1e-4
    """Weight of the squared velocity distance to the reference. 0 runs no reference forward."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Share of the rollout's noise levels that each sample is trained on (at least one)."""
    old_decay: Literal["copy", "standard", "slow"] | DecaySchedule = "standard"
    """How the rollout policy follows the trained one: copy (0), standard (rises by .001 a step to .5), slow (copies for
    75 steps, then rises by .0075 a step to .999), or a mapping of its own."""

    def num_trained_timesteps(self, sampling: SamplingRecipe) -> int:
        return num_of_share(sampling.steps, self.timestep_fraction)


class FlowGrpoAlgorithm(RlSettings):
    """Policy gradient on the denoise steps of stochastic rollouts: Flow-GRPO (arXiv 2505.05470) and its variants
    Flow-GRPO-Fast, MixGRPO, DanceGRPO and GRPO-Guard, which are settings of it and of `sampling`."""

    name: Literal["flow_grpo"]
    """Selects this algorithm."""
    clip_ratio: PositiveFloat = 1e-4
    """The ratio of new to old probability counts within 1 -+ clip_ratio. Log-probabilities are means over elements, so
    the published 1e-5 to 1e-3 are for latents of 65536 elements; small latents need larger ones."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The lower bound is 1 - clip_ratio_low. Unset: clip_ratio."""
    clip_ratio_high: PositiveFloat | None = None
    """The upper bound is 1 + clip_ratio_high. Unset: clip_ratio."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the distance to the reference. 0 runs no reference forward."""
    kl_type: Literal["velocity", "gaussian", "flow_grpo"] = "gaussian"
    """The distance: mean squared velocity difference; KL of the two steps, a mean over elements; or Flow-GRPO's, which
    is that KL times the length of the step (for flow_sde and dance)."""
    zero_std: Literal["keep", "drop"] = "drop"
    """A group whose rewards are all equal has the advantage 0: `drop` does not train it, `keep` does, for the sake of
    kl_beta."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rollout's noisy steps that each sample is trained on (at least one), drawn for each sample
    (DanceGRPO: .6)."""
    old_log_prob: Literal["auto", "rollout", "recompute"] = "auto"
    """Log-probabilities that ratios compare with. `rollout`: those of the rollout; `recompute`: one forward per trained
    step before the first update; `auto`: in the first update the new ones themselves, whose weights are the same, then
    the rollout's. With rollout.max_staleness above 0 the weights are not the same: `auto` is `recompute`, and both
    correct the credit of a sample by min(p_old / p_rollout, 2)."""
    log_prob: Literal["published", "gaussian"] = "published"
    """`published` leaves variance and constant out for the solver cps; its clip_ratio is another one
    than that of `gaussian`."""
    min_step_std: NonNegativeFloat = 0.05
    """Steps whose noise is smaller are refused: rounding errors of the velocity dominate their ratio. 0 allows all."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): a ratio without negative bias, on one scale for all steps."""
    guard_reweight: bool = True
    """GRPO-Guard: divide each step's loss by its length in sigma."""

    def num_trained_timesteps(self, sampling: SamplingRecipe) -> int:
        return num_of_share(sampling.num_noisy_steps, self.timestep_fraction)

    @model_validator(mode="after")
    def _all_read(self) -> FlowGrpoAlgorithm:
        if not self.guard:
            self.require_default("guard_reweight", unless="guard: true")
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            self.require_default("clip_ratio", unless="clip_ratio_low or clip_ratio_high unset")
        return self


class DdrlAlgorithm(RlSettings):
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
    min_num_conditional_frames: NonNegativeInt = 0
    """Smallest number of latent frames of the data that a group of rollouts is given: 0 none, 1 an image, 2 a video."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Largest such number; one is drawn for each group from those that the model takes."""
    exp_reward: bool = False
    """Train on exp_reward_baseline - exp(-A) in place of the advantage A."""
    exp_reward_baseline: NonNegativeFloat = 0.0
    """What exp(-A) is taken from. 1 lowers the variance and keeps the mean."""
    loss_scale: PositiveFloat = 1.0
    """Factor of the whole loss: it moves the threshold of engine.max_grad_norm, Adam ignores it."""

    def num_trained_timesteps(self, sampling: SamplingRecipe) -> int:
        return len(self.train_on)

    @model_validator(mode="after")
    def _consistent(self) -> DdrlAlgorithm:
        if len(set(self.train_on)) != len(self.train_on):
            raise ValueError(f"train_on names a step twice: {self.train_on}")
        if self.min_num_conditional_frames > self.max_num_conditional_frames:
            raise ValueError(
                f"min_num_conditional_frames {self.min_num_conditional_frames} is above max_num_conditional_frames "
                f"{self.max_num_conditional_frames}"
            )
        if self.data_beta == 0 and (self.data_on_first_only or not self.use_rl_sigma_and_noise):
            raise ValueError(
                "data_on_first_only and use_rl_sigma_and_noise are about the diffusion loss, which data_beta: 0 leaves "
                "out: remove them, or raise data_beta"
            )
        if self.exp_reward_baseline and not self.exp_reward:
            raise ValueError("exp_reward_baseline is only read with exp_reward: true")
        if self.exp_reward and self.exp_reward_baseline == 0 and self.adv_mode in ("positive_only", "one_only"):
            raise ValueError(
                f"exp_reward makes all advantages negative, and adv_mode: {self.adv_mode} leaves none of them: set an "
                "exp_reward_baseline"
            )
        return self


Algorithm = Annotated[SftAlgorithm | NftAlgorithm | FlowGrpoAlgorithm | DdrlAlgorithm, Field(discriminator="name")]
