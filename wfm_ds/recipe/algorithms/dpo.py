"""The settings of Diffusion-DPO; its mathematics: algorithms/dpo.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from wfm_ds.recipe.algorithms.supervised import SupervisedSettings


class DpoAlgorithm(SupervisedSettings):
    """Diffusion-DPO (arXiv 2311.12908) of flows (arXiv 2501.13918): learns from pairs of which one is preferred,
    without rewards or rollouts."""

    name: Literal["dpo"]
    """Selects this algorithm."""
    beta: PositiveFloat = 2000.0
    """How strongly the policy is held to the reference: half of it turns a difference of velocity errors, means over
    elements, into an implicit reward. The same at all noise levels."""

    implementation = "wfm_ds.algorithms.dpo:Dpo"
    takes_pairs = True
    num_media = 2
    references = ("ref",)
