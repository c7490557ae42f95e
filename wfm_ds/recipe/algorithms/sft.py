"""The settings of supervised fine-tuning; its mathematics: algorithms/sft.py."""

from __future__ import annotations

from typing import Literal

from wfm_ds.recipe.algorithms.supervised import SupervisedSettings


class SftAlgorithm(SupervisedSettings):
    """Supervised fine-tuning: velocity matching on data."""

    name: Literal["sft"]
    """Selects this algorithm."""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "edm", "min_snr"] = "none"
    """Weight of the velocity error by noise level."""

    implementation = "wfm_ds.algorithms.sft:Sft"
    takes_media = True
