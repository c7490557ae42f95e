"""The settings that all algorithms have which noise clean rollouts again; their mathematics:
algorithms/forward_process.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.algorithms.base import GivenFramesSettings, ModelFacts, OtherSections, num_of_share
from wfm_ds.recipe.sampling import SamplingRecipe


class ForwardProcessSettings(GivenFramesSettings):
    """Reinforcement learning on clean rollouts that are noised again."""

    levels: Literal["grid", "stratified"] = "grid"
    """Noise levels that a sample is trained on. `grid`: levels of the rollout's denoise steps, drawn for each sample
    without replacement. `stratified`: one draw in each of num_levels equal parts of (0, 1), shifted as the noise levels
    of the pipeline's scheduler are, however many steps a rollout has."""
    num_levels: PositiveInt | None = None
    """Noise levels that each sample is trained on. Unset: with `levels: grid` by timestep_fraction; `stratified` needs
    it."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.99
    """levels: grid: share of the rollout's noise levels that each sample is trained on (at least one), unless
    num_levels is set."""
    flow_shift: PositiveFloat | None = None
    """levels: stratified: sigma = shift * q / (1 + (shift - 1) * q) of a draw q. Unset: the shift of the pipeline's
    scheduler."""

    compares_log_probs = False

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        if self.num_levels is not None:
            return self.num_levels
        return num_of_share(sampling.steps, self.timestep_fraction)

    def check(self, recipe: OtherSections) -> None:
        super().check(recipe)
        if self.levels == "grid" and self.num_levels is not None and self.num_levels > recipe.sampling.steps:
            raise ValueError(
                f"algorithm.num_levels {self.num_levels} is more than the {recipe.sampling.steps} noise levels of "
                "sampling.steps: lower it, or set algorithm.levels: stratified"
            )

    def check_model(self, model: ModelFacts, sampling: SamplingRecipe) -> None:
        if self.levels == "stratified" and self.flow_shift is None:
            model.flow_shift(sampling)  # raises where the scheduler has none

    @model_validator(mode="after")
    def _levels_fit(self) -> ForwardProcessSettings:
        if self.levels == "stratified" and self.num_levels is None:
            raise ValueError("levels: stratified needs num_levels: 2 are enough for most, and 1 is noisy")
        if self.levels == "grid":
            self.require_default("flow_shift", unless="levels: stratified")
        if self.num_levels is not None:
            self.require_default("timestep_fraction", unless="num_levels unset")
        return self
