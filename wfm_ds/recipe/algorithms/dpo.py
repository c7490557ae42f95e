"""Settings of Diffusion-DPO. The loss is in algorithms/dpo.py."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from wfm_ds.recipe.algorithms.supervised import SupervisedSettings


class DpoAlgorithm(SupervisedSettings):
    """Diffusion-DPO (arXiv 2311.12908) for flow matching (arXiv 2501.13918): learns from preference pairs, without
    rewards or rollouts."""

    name: Literal["dpo"]
    """Selects this algorithm."""
    beta: PositiveFloat = 2000.0
    """Strength of the regularization towards the reference policy. The implicit reward is beta / 2 times a difference
    of mean squared velocity errors, with the same factor at all noise levels."""

    implementation = "wfm_ds.algorithms.dpo:Dpo"
    takes_pairs = True
    items_per_sample = 2
    reference_policies = ("ref",)
