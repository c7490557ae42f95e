"""ImageReward (arXiv 2304.05977): human rating of an image for its prompt, from the package image-reward."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from wfm_reward.base import MediaBatch, Range, Reward, Score
from wfm_reward.rewards._weights import loaded, pictures


class ImageReward(Reward):
    """ImageReward: standardised on the authors' validation set (mean 0, std 1), usually -2.3 to 2.

    Needs the package image-reward; the weights are ImageReward-v1.0.
    """

    name = "image_reward"
    media = frozenset({"image"})
    outputs: ClassVar = {"image_reward": Range(-math.inf, math.inf)}
    primary = "image_reward"

    def __init__(
        self, device: str = "cpu", *, model: str = "ImageReward-v1.0", med_config: str | None = None, **options: Any
    ) -> None:
        """`model`: ImageReward.pt, together with `med_config`; or the name of a model that the package downloads."""
        super().__init__(device, **options)
        self.model, self.med_config = model, med_config

    def load(self) -> None:
        def load_model(address: str) -> Any:
            import ImageReward as package

            extra = {} if self.med_config is None else {"med_config": self.med_config}
            return package.load(address, device=self.device, **extra)

        self._model = loaded(self.name, "the model", self.model, load_model)
        self._model.eval()

    def score(self, batch: MediaBatch) -> list[Score]:
        images = pictures(batch.media)
        return [item.scored(float(self._model.score(item.prompt, p))) for item, p in zip(batch, images, strict=True)]
