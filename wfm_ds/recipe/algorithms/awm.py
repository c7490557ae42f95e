"""Settings of AWM. The loss is in algorithms/awm.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import RecipeSections
from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe


class AwmAlgorithm(ForwardProcessSettings):
    """Advantage Weighted Matching (arXiv 2509.25050): policy gradient with the flow matching loss of a clean sample in
    place of its log-probability."""

    name: Literal["awm"]
    """Selects this algorithm."""
    weighting: Literal["ghuber", "uniform", "sigma", "sigma_squared"] = "ghuber"
    """Estimate of -log p of a sample, where l is the mean squared velocity error. `uniform`: l. `sigma`: sigma * l.
    `sigma_squared`: sigma^2 * l. `ghuber`: sigma * l^power / power."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    """With `weighting: ghuber`: exponent of l. Values below 1 reduce the influence of badly predicted samples."""
    clip_ratio: PositiveFloat = 1.0
    """PPO clip range: probability ratios are clipped to 1 - clip_ratio .. 1 + clip_ratio. Values of 1 or more remove
    the lower bound. In the first optimizer step of an RL step all ratios are 1."""
    adv_max: PositiveFloat = 1.0
    """Advantages are clipped to `adv_clip_max`, then scaled so that the largest possible magnitude is `adv_max`."""
    kl_beta: NonNegativeFloat = 1e-3
    """Weight of the squared velocity distance to the reference policy. 0: no reference forward pass."""
    ema_kl_beta: NonNegativeFloat = 0.0
    """Weight of the squared velocity distance to the EMA weights; needs the section `ema`. Published runs use 1 with an
    EMA decay of .3. 0: no forward pass with the EMA weights."""

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
