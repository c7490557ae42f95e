"""Recipe keys that control how advantages are computed from rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, model_validator

from wfm_ds.recipe.section import Section
from wfm_ds.recipe.sections import RewardRecipe


class AdvantageSettings(Section):
    """Keys that control how advantages are computed from rewards."""

    combine: Literal["sum", "mean", "gdpo"] = "sum"
    """How several rewards are combined. `sum`: compute one advantage from the weighted sum of the rewards. `mean`:
    compute an advantage per reward and take the mean of weight * advantage. `gdpo` (arXiv 2601.05242): compute an
    advantage per reward and normalize their weighted sum over all samples."""
    advantage_std: Literal["group", "global", "none"] = "global"
    """Divisor of the rewards after the mean of the group is subtracted. `group`: standard deviation of the group.
    `global`: standard deviation of all samples. `none`: no division."""
    std_unbiased: bool = False
    """Use the unbiased standard deviation (divide by n - 1), like some other trainers."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages are clipped to this magnitude."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Transformation of clipped advantages. `positive_only`, `negative_only`: set advantages of the other sign to 0.
    `one_only`: 1 for positive advantages, 0 for the others. `binary`: only the sign."""

    def check_reward(self, reward: RewardRecipe) -> None:
        """Raise ValueError if the section `reward` has keys that `combine` does not use."""
        if self.combine != "sum" and (reward.clip is not None or reward.scale != 1):
            raise ValueError(
                f"algorithm.combine: {self.combine} does not use the weighted sum that reward.clip and reward.scale "
                "act on: remove them, or set clip in reward.functions"
            )

    @model_validator(mode="after")
    def _check_normalization(self) -> AdvantageSettings:
        if self.combine == "gdpo" and self.advantage_std != "group":
            raise ValueError("combine: gdpo normalizes each reward within its group: set advantage_std: group")
        return self
