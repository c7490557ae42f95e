"""CLIP score: similarity of image and prompt by OpenAI's CLIP ViT-L/14."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import MediaBatch, Range, Reward, Score
from wfm_reward.rewards._clip import ClipModel


class ClipScore(Reward):
    """Cosine similarity of image and prompt, without CLIP's logit scale: -1 to 1, usually 0.15 to 0.35."""

    name = "clipscore"
    backbone = "CLIP"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"clipscore": Range(-1.001, 1.001)}  # rounding can exceed 1
    primary_output = "clipscore"
    hub_files: ClassVar = {"model": "model"}

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "openai/clip-vit-large-patch14",
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self.model, self.dtype = model, dtype

    def load(self) -> None:
        self._clip = ClipModel(self.name, self.model, self.model, self.device, self.dtype)

    def score(self, batch: MediaBatch) -> list[Score]:
        cosines = self._clip.image_text_cosines(batch.media, batch.prompts)
        return [item.score(cosine) for item, cosine in zip(batch, cosines, strict=True)]
