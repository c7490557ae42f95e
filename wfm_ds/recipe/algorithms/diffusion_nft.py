"""Settings of DiffusionNFT. The loss is in algorithms/diffusion_nft.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, NonNegativeFloat, NonNegativeInt, PositiveFloat, Tag, model_validator

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.section import Decay, Section, value_form
from wfm_ds.recipe.sections import RolloutRecipe


class DecaySchedule(Section):
    """Schedule of the old policy's decay: `initial` for `flat_steps` optimizer steps, then increasing by `slope` per
    step up to `max`."""

    flat_steps: NonNegativeInt = 0
    """Optimizer steps with the initial decay."""
    initial: Decay = 0.0
    """Initial decay. 0: copy the trained weights."""
    slope: NonNegativeFloat = 0.001
    """Increase per optimizer step."""
    max: Decay = 0.5
    """Maximum decay."""

    @model_validator(mode="after")
    def _check_bounds(self) -> DecaySchedule:
        if self.initial > self.max:
            raise ValueError(f"initial {self.initial} is above max {self.max}: raise max")
        return self


class NftAlgorithm(ForwardProcessSettings):
    """DiffusionNFT (arXiv 2509.16117): reinforcement learning on the forward process, without log-probabilities."""

    name: Literal["diffusion_nft"]
    """Selects this algorithm."""
    beta: PositiveFloat = 1.0
    """Mixing coefficient of the trained and the old velocity in the implicit positive and negative policies."""
    kl_beta: NonNegativeFloat = 1e-4
    """Weight of the squared velocity distance to the reference policy. 0: no reference forward pass."""
    old_decay: Annotated[
        Annotated[Literal["copy", "standard", "slow"], Tag("scalar")] | Annotated[DecaySchedule, Tag("mapping")],
        Discriminator(value_form),
    ] = "standard"
    """Decay of the old policy, which generates the rollouts. `copy`: 0. `standard`: increases by .001 per optimizer
    step to .5. `slow`: 0 for 75 optimizer steps, then increases by .0075 per step to .999. Or a custom schedule as a
    mapping."""

    implementation = "wfm_ds.algorithms.diffusion_nft:DiffusionNft"

    @property
    def has_regularizer(self) -> bool:
        return self.kl_beta > 0

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"old", "ref"} if self.kl_beta > 0 else {"old"})
