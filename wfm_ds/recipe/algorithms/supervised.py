"""Shared settings of supervised algorithms: the distribution of noise levels."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, ModelProperties
from wfm_ds.recipe.sampling import SamplingRecipe


class SupervisedSettings(AlgorithmSettings):
    """Keys of all supervised algorithms: noise levels and conditioning frames (algorithms/sft.py)."""

    timestep_density: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    """Probability density of the noise level q before the shift (SD3). `logit_normal`: a larger mean gives more
    noise."""
    logit_mean: float = 0.0
    """With `timestep_density: logit_normal`: mean of logit(q)."""
    logit_std: PositiveFloat = 1.0
    """With `timestep_density: logit_normal`: standard deviation of logit(q)."""
    mode_scale: Annotated[float, Field(ge=-1, le=1.75)] = 1.29
    """With `timestep_density: mode`: scale of SD3's mode density."""
    flow_shift: PositiveFloat | None = None
    """Shift of the noise level: sigma = shift * q / (1 + (shift - 1) * q). Unset: the shift of the pipeline's
    scheduler."""
    stratified: bool = False
    """Stratify the noise levels of a global batch over the density instead of sampling them independently."""
    min_num_conditional_frames: NonNegativeInt = 0
    """Minimum number of conditioning frames, for video models that support them: clean first latent frames without a
    loss. 0: text to video, 1: image to video, 2: video to video. n latent frames are 1 + 4 * (n - 1) pixel frames."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Maximum number of conditioning frames. The number is chosen uniformly at random per sample and epoch."""

    implementation: ClassVar[str]
    """The subclass of Supervised, as `package.module:Class`."""
    items_per_sample: ClassVar[int] = 1
    """Images or videos per sample in a forward pass: 2 for preference pairs."""

    @property
    def conditioning_frame_range(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    def check_model(self, model: ModelProperties, sampling: SamplingRecipe) -> None:
        if self.flow_shift is None:
            model.flow_shift(sampling)  # raises if the scheduler has none

    @model_validator(mode="after")
    def _check_frame_range(self) -> SupervisedSettings:
        low, high = self.min_num_conditional_frames, self.max_num_conditional_frames
        if low > high:
            raise ValueError(
                f"min_num_conditional_frames {low} is above max_num_conditional_frames {high}: raise the maximum"
            )
        return self

    @model_validator(mode="after")
    def _check_unused_keys(self) -> SupervisedSettings:
        if self.timestep_density != "logit_normal":
            self.require_defaults("logit_mean", "logit_std", unless="timestep_density: logit_normal")
        if self.timestep_density != "mode":
            self.require_defaults("mode_scale", unless="timestep_density: mode")
        return self
