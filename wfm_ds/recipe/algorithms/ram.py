"""Settings of RAM. The loss is in algorithms/ram.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe

MAX_EXPONENT = 10.0  # e^10 is about 22000


class RamAlgorithm(ForwardProcessSettings):
    """Reinforce Adjoint Matching (arXiv 2605.10759): flow matching to the velocity of the reference policy, which is
    shifted according to the reward."""

    name: Literal["ram"]
    """Selects this algorithm."""
    advantage_std: Literal["group", "global", "none"] = "group"
    """Divisor of centred rewards: the standard deviation of the group, of all samples, or none."""
    multiplier: PositiveFloat = 5.0
    """Strength of the reward relative to the reference policy: tilt = multiplier * advantage."""
    tilt: Literal["linear", "exp"] = "linear"
    """Factor of a sample's velocity error in the target. `linear`: tilt. `exp`: exp(tilt) - 1 (tilt matching, arXiv
    2512.21829); needs a small `multiplier`. `linear` approximates `exp` to first order."""

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
