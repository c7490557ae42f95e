"""Interface between the supervised training loop and an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.recipe.algorithms import SupervisedSettings
from wfm_ds.sampling.latents import StreamWeights, require_latents, sample_mean


class SupervisedAlgorithm(ABC):
    """Base class of supervised algorithms.

    A sample has `settings.items_per_sample` images or videos: two for a preference pair, otherwise one.
    """

    area: ClassVar[str]
    """Prefix of the algorithm's metric tags."""
    settings: SupervisedSettings

    def __init__(self, settings: SupervisedSettings) -> None:
        self.settings = settings

    @abstractmethod
    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        """Return (unreduced loss of each of the B samples [B], statistics).

        errors: velocity errors of the trained policy, [items_per_sample, B], with gradient. sigma: noise levels [B].
        references: {reference policy: its velocity errors}.
        """

    @abstractmethod
    def validation_loss(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (validation loss [N, L], {metric: values [N]}) of N held-out samples at L noise levels.

        errors: velocity errors of the evaluated policy, [items_per_sample, N, L]. references: {reference policy: its
        velocity errors}.
        """


def velocity_errors(
    velocity: Tensor,
    clean_latents: Tensor,
    noise: Tensor,
    conditioning_mask: Tensor | None = None,
    stream_weights: StreamWeights | None = None,
) -> Tensor:
    """Return mean((velocity - (noise - clean_latents))^2) of each sample, [B].

    Latents and velocity are [B,C,h,w], [B,C,T,h,w] or, for several streams, [B,N] float32. conditioning_mask:
    [B,1,T,1,1] float32, 1 on conditioning frames, which are excluded from the mean. stream_weights: weights of the
    streams in the mean. Raises ValueError for other shapes and dtypes.
    """
    require_latents(velocity=velocity, clean_latents=clean_latents, noise=noise)
    square_error = (velocity - (noise - clean_latents)).square()
    if conditioning_mask is not None and conditioning_mask.shape != (len(velocity), 1, *velocity.shape[2:3], 1, 1):
        raise ValueError(
            f"conditioning_mask must be [B,1,T,1,1] for {list(velocity.shape)}, got {list(conditioning_mask.shape)}"
        )
    if stream_weights is not None:
        return sample_mean(square_error, stream_weights.element_weights(velocity.device))
    return sample_mean(square_error, None if conditioning_mask is None else 1 - conditioning_mask)
