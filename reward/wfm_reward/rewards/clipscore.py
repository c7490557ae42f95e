"""CLIP score: similarity of image and prompt by OpenAI's CLIP ViT-L/14."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import Range
from wfm_reward.rewards._clip import ClipReward


class ClipScore(ClipReward):
    """Cosine similarity of image and prompt, without CLIP's logit scale: -1 to 1, usually 0.15 to 0.35."""

    name = primary_output = "clipscore"
    outputs: ClassVar = {"clipscore": Range(-1.001, 1.001)}  # rounding can exceed 1

    def __init__(self, device: str = "cpu", *, model: str = "openai/clip-vit-large-patch14", **options: Any) -> None:
        super().__init__(device, model=model, **options)
