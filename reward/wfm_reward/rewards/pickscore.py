"""PickScore (arXiv 2305.01569): human preference score from a fine-tuned CLIP-H."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import MediaBatch, Range, Score
from wfm_reward.rewards._clip import ClipModel, ClipReward

SCALE = 26.0


class PickScore(ClipReward):
    """PickScore: exp(logit_scale) * (cosine similarity of image and prompt) / 26, usually 0.6 to 1."""

    name = primary_output = "pickscore"
    outputs: ClassVar = {"pickscore": Range(-100 / SCALE, 100 / SCALE)}  # CLIP's logit scale is at most 100
    hub_files: ClassVar = {"model": "model", "processor": "processor"}

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        **options: Any,
    ) -> None:
        super().__init__(device, model=model, **options)
        self.processor = processor

    def load(self) -> None:
        self._clip = ClipModel(self.name, self.model, self.processor, self.device, self.dtype)

    def score(self, batch: MediaBatch) -> list[Score]:
        cosines = self._clip.image_text_cosines(batch.media, batch.prompts)
        scale = self._clip.logit_scale / SCALE
        return [item.score(scale * cosine) for item, cosine in zip(batch, cosines, strict=True)]
