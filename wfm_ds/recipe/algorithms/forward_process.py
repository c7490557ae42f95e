"""Settings of algorithms that train on clean rollout samples with added noise: DiffusionNFT, AWM, RAM, DGPO."""

from __future__ import annotations

from typing import Annotated, Literal

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

from wfm_ds.recipe.algorithms.base import ModelProperties, RecipeSections, StreamSettings, count_of_fraction
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.section import Decay, Section, value_form


class ForwardProcessSettings(StreamSettings):
    """Keys of RL algorithms on the forward process: they add noise to clean rollout samples and train on them."""

    levels: Literal["grid", "stratified"] = "grid"
    """Noise levels that each sample is trained on. `grid`: random levels of the rollout's denoising steps, without
    replacement. `stratified`: one random value in each of `num_levels` equal parts of (0, 1), with the scheduler's
    shift, for any number of rollout steps."""
    num_levels: PositiveInt | None = None
    """Number of noise levels per sample. Required for `levels: stratified`. Unset: determined by
    `timestep_fraction`."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.99
    """With `levels: grid`: fraction of the rollout's noise levels that each sample is trained on (at least one), if
    `num_levels` is unset."""
    flow_shift: PositiveFloat | None = None
    """With `levels: stratified`: shift in sigma = shift * q / (1 + (shift - 1) * q) for a random q. Unset: the shift of
    the pipeline's scheduler."""

    compares_log_probs = False
    matches_flow = True

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        if self.num_levels is not None:
            return self.num_levels
        return count_of_fraction(self.num_grid_levels(sampling.steps), self.timestep_fraction)

    def num_grid_levels(self, num_steps: int) -> int:
        """Return how many noise levels of a rollout with `num_steps` steps are used for training: the highest ones."""
        return num_steps

    @property
    def grid_levels_key(self) -> str:
        return "sampling.steps"

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        most = self.num_grid_levels(recipe.sampling.steps)
        if self.levels == "grid" and self.num_levels is not None and self.num_levels > most:
            raise ValueError(
                f"algorithm.num_levels {self.num_levels} is more than {self.grid_levels_key} {most}: lower it, or set "
                "algorithm.levels: stratified"
            )

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        if self.levels == "stratified" and self.flow_shift is None:
            model.flow_shift(sampling)  # raises if the scheduler has none

    @model_validator(mode="after")
    def _check_levels(self) -> ForwardProcessSettings:
        if self.levels == "stratified" and self.num_levels is None:
            raise ValueError("levels: stratified needs num_levels: 2 usually suffices, 1 is noisy")
        if self.levels == "grid":
            self.require_defaults("flow_shift", unless="levels: stratified")
        if self.num_levels is not None:
            self.require_defaults("timestep_fraction", unless="num_levels unset")
        return self


class DecaySchedule(Section):
    """Schedule of the old policy's decay: `initial` for `flat_steps` optimizer steps, then increasing by `slope` per
    step up to `max`."""

    flat_steps: NonNegativeInt = 0
    """Optimizer steps with the initial decay."""
    initial: Decay = 0.0
    """Initial decay. 0: copy the trained weights."""
    slope: NonNegativeFloat = 0.001
    """Increase per optimizer step."""
    max: Decay = 0.5
    """Maximum decay."""

    @model_validator(mode="after")
    def _check_bounds(self) -> DecaySchedule:
        if self.initial > self.max:
            raise ValueError(f"initial {self.initial} is above max {self.max}: raise max")
        return self


class NftAlgorithm(ForwardProcessSettings):
    """DiffusionNFT (arXiv 2509.16117): reinforcement learning on the forward process, without log-probabilities."""

    name: Literal["diffusion_nft"]
    """Selects this algorithm."""
    beta: PositiveFloat = 1.0
    """Coefficient beta of the implicit policies, computed from the trained velocity v and the old velocity v_old: beta
    * v + (1 - beta) * v_old (positive) and (1 + beta) * v_old - beta * v (negative)."""
    kl_beta: NonNegativeFloat = 1e-4
    """Weight of the mean squared difference of the trained and reference velocities. 0: no reference forward pass."""
    old_decay: Annotated[
        Annotated[Literal["copy", "standard", "slow"], Tag("scalar")] | Annotated[DecaySchedule, Tag("mapping")],
        Discriminator(value_form),
    ] = "standard"
    """Decay of the old policy, a moving average of the trained weights that generates the rollouts. `copy`: 0.
    `standard`: increases by .001 per optimizer step to .5. `slow`: 0 for 75 optimizer steps, then increases by .0075
    per step to .999. Or a custom schedule as a mapping."""

    implementation = "wfm_ds.algorithms.diffusion_nft:DiffusionNft"

    @property
    def has_regularizer(self) -> bool:
        return self.kl_beta > 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"old", "ref"} if self.kl_beta > 0 else {"old"})


class AwmAlgorithm(ForwardProcessSettings):
    """Advantage Weighted Matching (arXiv 2509.25050): policy gradient that replaces the log-probability of a sample by
    its negative flow-matching loss."""

    name: Literal["awm"]
    """Selects this algorithm."""
    weighting: Literal["ghuber", "uniform", "sigma", "sigma_squared"] = "ghuber"
    """Replacement for the negative log-probability of a sample, where sigma is the noise level and l the mean squared
    velocity error at this level. `uniform`: l. `sigma`: sigma * l. `sigma_squared`: sigma^2 * l. `ghuber`: sigma *
    l^power / power."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """With `weighting: ghuber`: exponent of l. Values below 1 reduce the influence of badly predicted samples."""
    clip_ratio: PositiveFloat = 1.0
    """PPO clip range: probability ratios are clipped to 1 - clip_ratio .. 1 + clip_ratio. Values of 1 or more remove
    the lower bound. In the first optimizer step of an RL step all ratios are 1."""
    adv_max: PositiveFloat = 1.0
    """Advantages are clipped to `adv_clip_max`, then scaled so that the largest possible magnitude is `adv_max`."""
    kl_beta: NonNegativeFloat = 1e-3
    """Weight of the mean squared difference of the trained and reference velocities. 0: no reference forward pass."""
    ema_kl_beta: NonNegativeFloat = 0.0
    """Weight of the mean squared difference of the velocities of the trained and the EMA weights. Needs the section
    `ema`. Published runs use 1 with an EMA decay of .3. 0: no forward pass with the EMA weights."""

    implementation = "wfm_ds.algorithms.awm:Awm"

    @property
    def has_regularizer(self) -> bool:
        return self.kl_beta > 0 or self.ema_kl_beta > 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"} if self.kl_beta > 0 else ())

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.ema_kl_beta > 0 and (recipe.ema is None or recipe.ema.decay == 0):
            raise ValueError("algorithm.ema_kl_beta needs averaged weights: add `ema: {decay: 0.3}`, or set it to 0")

    @model_validator(mode="after")
    def _check_power(self) -> AwmAlgorithm:
        if self.weighting != "ghuber":
            self.require_defaults("power", unless="weighting: ghuber")
        return self


MAX_EXPONENT = 10.0  # e^10 is about 22000


class RamAlgorithm(ForwardProcessSettings):
    """Reinforce Adjoint Matching (arXiv 2605.10759): flow matching to a target, which is the velocity of the reference
    policy, shifted according to the reward."""

    name: Literal["ram"]
    """Selects this algorithm."""
    advantage_std: Literal["group", "global", "none"] = "group"
    """Divisor of the rewards after the mean of the group is subtracted. `group`: standard deviation of the group.
    `global`: standard deviation of all samples. `none`: no division."""
    multiplier: PositiveFloat = 5.0
    """Strength of the reward relative to the reference policy (see `tilt`)."""
    tilt: Literal["linear", "exp"] = "linear"
    """Factor R in the target velocity v_ref + R * (u - v). v and v_ref are the velocities of the trained and the
    reference policy, and u = noise - clean latents. `linear`: R = multiplier * advantage. `exp`: R = exp(multiplier *
    advantage) - 1 (tilt matching, arXiv 2512.21829); needs a small `multiplier`."""

    implementation = "wfm_ds.algorithms.ram:Ram"

    @model_validator(mode="after")
    def _check_tilt(self) -> RamAlgorithm:
        largest = self.multiplier * self.adv_clip_max
        if self.tilt == "exp" and largest > MAX_EXPONENT:
            raise ValueError(
                f"tilt: exp needs multiplier {self.multiplier:g} * adv_clip_max {self.adv_clip_max:g} = {largest:g} "
                f"to be at most {MAX_EXPONENT:g}: lower one of them"
            )
        return self

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"})


class DgpoAlgorithm(ForwardProcessSettings):
    """DGPO (arXiv 2510.08425): preference optimization that compares the good samples of a group with the bad ones. The
    loss adds noise to the generated samples (the forward process)."""

    name: Literal["dgpo"]
    """Selects this algorithm."""
    updates_per_rollout: Literal[1] = 1
    """Optimizer steps per RL step. Always 1, so that every update contains whole groups."""
    beta: PositiveFloat = 100.0
    """Strength of the group weighting. Larger values reduce a group's weight faster once the trained policy ranks the
    group's samples better than the reference policy does."""

    clip_ratio: PositiveFloat | None = 0.01
    """Clip range: a sample has no gradient if its ratio exp(l_old - l) is above 1 + clip_ratio (positive advantage) or
    below 1 - clip_ratio (negative advantage), where l and l_old are the mean squared velocity errors of the trained
    policy and of the old policy, a moving average of the trained weights. null: no clipping and no old policy."""
    kl_beta: NonNegativeFloat = 0.02
    """Weight of the mean squared difference of the trained and reference velocities."""
    first_levels: PositiveInt | None = None
    """With `levels: grid`: number of the rollout's noise levels to draw from, beginning with the highest. The
    authors use 5 or 7 of 10 levels, with `num_levels: 4`. Unset: all."""

    implementation = "wfm_ds.algorithms.dgpo:Dgpo"

    @property
    def has_regularizer(self) -> bool:
        return self.kl_beta > 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"} if self.clip_ratio is None else {"ref", "old"})

    def num_grid_levels(self, num_steps: int) -> int:
        return num_steps if self.first_levels is None else self.first_levels

    @property
    def grid_levels_key(self) -> str:
        return "sampling.steps" if self.first_levels is None else "algorithm.first_levels"

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.first_levels is not None and self.first_levels > recipe.sampling.steps:
            raise ValueError(
                f"algorithm.first_levels {self.first_levels} is more than sampling.steps {recipe.sampling.steps}: "
                "lower it"
            )

    @model_validator(mode="after")
    def _check_first_levels(self) -> DgpoAlgorithm:
        if self.levels == "stratified":
            self.require_defaults("first_levels", unless="levels: grid")
        return self
