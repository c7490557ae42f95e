"""The settings of supervised fine-tuning; its mathematics: algorithms/sft.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import AlgorithmSettings, ModelFacts


class SftAlgorithm(AlgorithmSettings):
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
    """Video families that can continue a video: at least this many first latent frames are given, clean and outside
    the loss (0: text to video, 1: image to video, 2: video to video; n latent frames are 1 + 4 * (n - 1) pixel
    frames)."""
    max_num_conditional_frames: NonNegativeInt = 0
    """Largest such number. It is drawn anew for each sample and epoch, all numbers with the same chance."""

    takes_media = True

    @property
    def num_conditional_frames(self) -> tuple[int, int]:
        return self.min_num_conditional_frames, self.max_num_conditional_frames

    def check_model(self, model: ModelFacts) -> None:
        if self.flow_shift is None:
            _ = model.flow_shift  # raises where the scheduler has none

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
