"""UnifiedReward (arXiv 2503.05236): a vision-language model rates an image for its caption from 1 to 5."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from wfm_reward.base import MediaItem, Range, Score
from wfm_reward.rewards._vlm import VlmReward, image_content

FINAL_SCORE = re.compile(r"Final Score:\s*([1-5](?:\.\d+)?)")
PROMPT_TEMPLATE = (  # the prompt that the model was trained with: github.com/CodeGoat24/UnifiedReward
    "<image>\nYou are given a text caption and a generated image based on that caption. Your task is to evaluate this "
    "image based on two key criteria:\n1. Alignment with the Caption: Assess how well this image aligns with the "
    "provided caption. Consider the accuracy of depicted objects, their relationships, and attributes as described in "
    "the caption.\n2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
    "preservation, color accuracy, and overall aesthetic appeal.\nBased on the above criteria, assign a score from 1 "
    "to 5 after 'Final Score:'.\nYour task is provided as follows:\nText Caption: [{prompt}]"
)


class UnifiedReward(VlmReward):
    """UnifiedReward: the "Final Score" (1 to 5) divided by 5, which gives 0.2 to 1.

    A reply without a final score is a failure.
    """

    name = primary_output = "unified_reward"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"unified_reward": Range(0.2, 1.0)}

    def __init__(self, device: str = "cpu", *, model: str = "UnifiedReward-7b-v1.5", **options: Any) -> None:
        super().__init__(device, model=model, **options)

    def rate_item(self, item: MediaItem) -> Score:
        question = {"type": "text", "text": PROMPT_TEMPLATE.format(prompt=item.prompt)}
        text = self.request_text([{"role": "user", "content": [image_content(item.frames[0]), question]}])
        match = FINAL_SCORE.search(text)
        if match is None:
            return item.fail(f"the reply has no final score: {' '.join(text.split())[:120]!r}")
        return item.score(float(match[1]) / 5)
