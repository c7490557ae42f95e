"""Shared settings of algorithms that add noise to clean rollout samples and train on them
(algorithms/forward_process.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.algorithms.base import ConditioningFramesSettings, ModelProperties, RecipeSections, count_of_fraction
from wfm_ds.recipe.sampling import SamplingRecipe


class ForwardProcessSettings(ConditioningFramesSettings):
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

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        if self.num_levels is not None:
            return self.num_levels
        return count_of_fraction(sampling.steps, self.timestep_fraction)

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        if self.levels == "grid" and self.num_levels is not None and self.num_levels > recipe.sampling.steps:
            raise ValueError(
                f"algorithm.num_levels {self.num_levels} is more than sampling.steps {recipe.sampling.steps}: lower "
                "it, or set algorithm.levels: stratified"
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
