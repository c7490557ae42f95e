"""The interface between the loop that trains on data alone and an algorithm.

What such an algorithm needs of a forward is one number a medium: the error of its velocity. So the loop can ask several
policies, one after the other, and keep no predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.recipe.algorithms import SupervisedSettings
from wfm_ds.sampling.shapes import require_latents, sample_mean


class Supervised(ABC):
    """One supervised algorithm. Shapes: M media of each sample (SupervisedSettings.num_media), B samples of a batch, N
    of the held-out data, L noise levels."""

    area: ClassVar[str]
    """The first word of the tags of its metrics."""
    settings: SupervisedSettings

    def __init__(self, settings: SupervisedSettings) -> None:
        self.settings = settings

    @abstractmethod
    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        """Return the loss of each sample [B], unreduced, and its statistics besides.

        errors: of the trained policy [M, B] (velocity_errors), with gradient; sigma [B]: the noise level that all media
        of a sample have; references: errors [M, B] of the other policies.
        """

    @abstractmethod
    def held_out(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the validation loss [N, L], and statistics of each held-out sample [N] by name.

        errors: of the evaluated policy [M, N, L]; references: of the other policies.
        """


def velocity_errors(
    velocity: Tensor, clean_latents: Tensor, noise: Tensor, conditional_mask: Tensor | None = None
) -> Tensor:
    """Return mean((velocity - (noise - clean_latents))^2) of each row: [B], unreduced.

    Latents and velocity [B,C,h,w] or [B,C,T,h,w] float32. conditional_mask [B,1,T,1,1] float32: 1 on frames that were
    given to the network instead of predicted: the mean is over the others. Raises ValueError for other shapes and
    dtypes.
    """
    require_latents(velocity=velocity, clean_latents=clean_latents, noise=noise)
    square_error = (velocity - (noise - clean_latents)).square()
    if conditional_mask is not None and conditional_mask.shape != (len(velocity), 1, *velocity.shape[2:3], 1, 1):
        raise ValueError(
            f"conditional_mask must be [B,1,T,1,1] for {list(velocity.shape)}, got {list(conditional_mask.shape)}"
        )
    return sample_mean(square_error, None if conditional_mask is None else 1 - conditional_mask)
