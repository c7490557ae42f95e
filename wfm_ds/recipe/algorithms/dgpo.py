"""The settings of DGPO; its mathematics: algorithms/dgpo.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from wfm_ds.recipe.algorithms.forward_process import ForwardProcessSettings
from wfm_ds.recipe.sections import RolloutRecipe


class DgpoAlgorithm(ForwardProcessSettings):
    """DGPO (arXiv 2510.08425): preferences between the good and the bad samples of a group, on the forward process."""

    name: Literal["dgpo"]
    """Selects this algorithm."""
    updates_per_rollout: Literal[1] = 1
    """Optimizer steps per RL step: always one, which sees every group whole."""
    beta: PositiveFloat = 100.0
    """How fast a group that the policy tells apart better than the reference does loses weight."""

    implementation = "wfm_ds.algorithms.dgpo:Dgpo"

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"})
