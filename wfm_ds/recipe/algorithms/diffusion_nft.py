"""The settings of DiffusionNFT; its mathematics: algorithms/diffusion_nft.py."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.section import Decay, Section
from wfm_ds.recipe.sections import RolloutRecipe


class DecaySchedule(Section):
    """Decay of the old policy after optimizer step j: `initial` while j < flat_steps, then up by `slope` to `max`."""

    flat_steps: NonNegativeInt = 0
    """Steps before the rise."""
    initial: Decay = 0.0
    """Decay at first; 0 copies the trained weights."""
    slope: NonNegativeFloat = 0.001
    """Rise per optimizer step."""
    max: Decay = 0.5
    """Upper bound."""

    @model_validator(mode="after")
    def _rising(self) -> DecaySchedule:
        if self.initial > self.max:
            raise ValueError(f"initial {self.initial} is above max {self.max}: raise max")
        return self


class NftAlgorithm(ForwardProcessSettings):
    """DiffusionNFT (arXiv 2509.16117): forward-process reinforcement learning, no log-probabilities."""

    name: Literal["diffusion_nft"]
    """Selects this algorithm."""
    beta: PositiveFloat = 1.0
    """Mixing of trained and old velocity in the implicit positive and negative policies."""
    kl_beta: NonNegativeFloat = 1e-4
    """Weight of the squared velocity distance to the reference. 0 runs no reference forward."""
    old_decay: Literal["copy", "standard", "slow"] | DecaySchedule = "standard"
    """How the rollout policy follows the trained one: copy (0), standard (rises by .001 a step to .5), slow (copies for
    75 steps, then rises by .0075 a step to .999), or a mapping of its own."""

    implementation = "wfm_ds.algorithms.diffusion_nft:DiffusionNft"

    @property
    def regularizes(self) -> bool:
        return self.kl_beta > 0

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"old", "ref"} if self.kl_beta > 0 else {"old"})
