"""ImageReward (arXiv 2304.05977): human rating of an image for its prompt, from the package image-reward."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import UNBOUNDED, MediaBatch, Reward, Score
from wfm_reward.rewards._weights import load_pretrained, to_pil_images


class ImageReward(Reward):
    """ImageReward: rating with mean 0 and std 1 on the authors' validation set, usually -2.3 to 2.

    Needs the package image-reward.
    """

    name = primary_output = "image_reward"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"image_reward": UNBOUNDED}
    download_note = "the package image-reward downloads its weights when the reward starts"

    def __init__(
        self, device: str = "cpu", *, model: str = "ImageReward-v1.0", med_config: str | None = None, **options: Any
    ) -> None:
        """model: name of a model that the package downloads, or path of ImageReward.pt, which needs `med_config`."""
        super().__init__(device, **options)
        self.model, self.med_config = model, med_config

    def load(self) -> None:
        def load_model(address: str) -> Any:
            import ImageReward as package

            extra = {} if self.med_config is None else {"med_config": self.med_config}
            return package.load(address, device=self.device, **extra)

        self._model = load_pretrained(self.name, "the model", self.model, load_model)
        self._model.eval()

    def score(self, batch: MediaBatch) -> list[Score]:
        images = to_pil_images(batch.media)
        return [item.score(float(self._model.score(item.prompt, p))) for item, p in zip(batch, images, strict=True)]
