"""The settings of RAM; its mathematics: algorithms/ram.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe

MAX_EXPONENT = 10.0  # of a tilt: already a factor of 22000


class RamAlgorithm(ForwardProcessSettings):
    """Reinforce Adjoint Matching (arXiv 2605.10759): flow matching whose target is the reference's velocity, moved by
    the reward."""

    name: Literal["ram"]
    """Selects this algorithm."""
    advantage_std: Literal["group", "global", "none"] = "group"
    """What the centred reward is divided by: the standard deviation of its group, of all samples, or nothing."""
    multiplier: PositiveFloat = 5.0
    """How far the reward moves the policy from the reference: the advantage times this is the tilt."""
    tilt: Literal["linear", "exp"] = "linear"
    """The factor of a sample's error in the target: `linear` the tilt itself; `exp` its exponential less 1, as tilt
    matching has it (arXiv 2512.21829), of which `linear` is the first order. It needs a small multiplier."""

    implementation = "wfm_ds.algorithms.ram:Ram"

    @model_validator(mode="after")
    def _bounded(self) -> RamAlgorithm:
        largest = self.multiplier * self.adv_clip_max
        if self.tilt == "exp" and largest > MAX_EXPONENT:
            raise ValueError(
                f"tilt: exp takes the exponential of up to multiplier {self.multiplier:g} * adv_clip_max "
                f"{self.adv_clip_max:g} = {largest:g}: lower one of them, to a product of {MAX_EXPONENT:g} at most"
            )
        return self

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"})
