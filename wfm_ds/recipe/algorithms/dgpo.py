"""Settings of DGPO. The loss is in algorithms/dgpo.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe


class DgpoAlgorithm(ForwardProcessSettings):
    """DGPO (arXiv 2510.08425): preference optimization between the good and the bad samples of a group, on noised clean
    samples (the forward process)."""

    name: Literal["dgpo"]
    """Selects this algorithm."""
    updates_per_rollout: Literal[1] = 1
    """Optimizer steps per RL step. Always 1, so that every update contains whole groups."""
    beta: PositiveFloat = 100.0
    """Strength of the group weighting. Larger values reduce a group's weight faster once the policy ranks its samples
    better than the reference policy does."""

    implementation = "wfm_ds.algorithms.dgpo:Dgpo"

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"})
