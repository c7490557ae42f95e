"""The common part of algorithms that learn from data alone: the noise levels that they draw, and the facts that they
state."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, ModelFacts
from wfm_ds.recipe.sampling import SamplingRecipe


class SupervisedSettings(AlgorithmSettings):
    """The keys of every supervised algorithm: at which noise levels it looks at its data (algorithms/sft.py)."""

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
    stratified: bool = False
    """Spread the noise levels of a global batch evenly over the density instead of drawing them independently."""
    min_num_conditional_frames: NonNegativeInt = 0
    """Video families that can continue a video: at least this many first latent frames are given, clean and outside
    the loss (0: text to video, 1: image to video, 2: video to video; n latent frames are 1 + 4 * (n - 1) pixel
    frames)."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Largest such number. It is drawn anew for each sample and epoch, all numbers with the same chance."""

    implementation: ClassVar[str]
    """The class that computes it, a subclass of Supervised, as `package.module:Class`."""
    num_media: ClassVar[int] = 1
    """Images or videos of a sample, each a row of its forwards: 2 of a pair."""

    @property
    def num_conditional_frames(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    def check_model(self, model: ModelFacts, sampling: SamplingRecipe) -> None:
        if self.flow_shift is None:
            model.flow_shift(sampling)  # raises where the scheduler has none

    @model_validator(mode="after")
    def _ordered_frames(self) -> SupervisedSettings:
        low, high = self.min_num_conditional_frames, self.max_num_conditional_frames
        if low > high:
            raise ValueError(f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: raise it")
        return self

    @model_validator(mode="after")
    def _all_read(self) -> SupervisedSettings:
        if self.timestep_density != "logit_normal":
            self.require_default("logit_mean", "logit_std", unless="timestep_density: logit_normal")
        if self.timestep_density != "mode":
            self.require_default("mode_scale", unless="timestep_density: mode")
        return self
