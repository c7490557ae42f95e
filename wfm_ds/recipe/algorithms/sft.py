"""Settings of supervised fine-tuning. The loss is in algorithms/sft.py."""

from __future__ import annotations

from typing import Literal

from wfm_ds.recipe.algorithms.supervised import SupervisedSettings


class SftAlgorithm(SupervisedSettings):
    """Supervised fine-tuning: flow matching on the data."""

    name: Literal["sft"]
    """Selects this algorithm."""
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "edm", "min_snr"] = "none"
    """Loss weight as a function of the noise level."""

    implementation = "wfm_ds.algorithms.sft:Sft"
    takes_media = True
