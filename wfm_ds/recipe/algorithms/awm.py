"""The settings of AWM; its mathematics: algorithms/awm.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import OtherSections
from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe


class AwmAlgorithm(ForwardProcessSettings):
    """Advantage Weighted Matching (arXiv 2509.25050): policy gradients with the flow matching loss of a clean sample in
    place of the logarithm of its probability."""

    name: Literal["awm"]
    """Selects this algorithm."""
    weighting: Literal["ghuber", "uniform", "sigma", "sigma_squared"] = "ghuber"
    """What stands for -log p of a sample, l being the mean squared error of its velocity: `uniform` l; `sigma`
    sigma * l; `sigma_squared` sigma^2 * l; `ghuber` sigma * l^power / power."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """weighting: ghuber: the power of l. Below 1 a badly predicted sample counts less."""
    clip_ratio: PositiveFloat = 1.0
    """The ratio of new to old probability counts within 1 -+ clip_ratio. From 1 on it has no lower bound. In the first
    optimizer step of an RL step all ratios are 1."""
    adv_max: PositiveFloat = 1.0
    """Advantages, clipped to adv_clip_max, are scaled so that this is the largest possible one."""
    kl_beta: NonNegativeFloat = 1e-3
    """Weight of the squared velocity distance to the reference. 0 runs no reference forward."""
    ema_kl_beta: NonNegativeFloat = 0.0
    """Weight of the squared velocity distance to the averaged weights of the section `ema`, which that needs. Published
    runs have 1, with an average that follows closely (a decay of .3). 0 runs no forward of it."""

    implementation = "wfm_ds.algorithms.awm:Awm"

    @property
    def regularizes(self) -> bool:
        return self.kl_beta > 0 or self.ema_kl_beta > 0

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"} if self.kl_beta > 0 else ())

    def check(self, recipe: OtherSections) -> None:
        super().check(recipe)
        if self.ema_kl_beta > 0 and (recipe.ema is None or recipe.ema.decay == 0):
            raise ValueError(
                "algorithm.ema_kl_beta is a distance to averaged weights, which this recipe does not have: "
                "add `ema: {decay: 0.3}`, or set it to 0"
            )

    @model_validator(mode="after")
    def _power_read(self) -> AwmAlgorithm:
        if self.weighting != "ghuber":
            self.require_default("power", unless="weighting: ghuber")
        return self
