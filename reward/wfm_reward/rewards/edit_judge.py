"""Scores of an edited image from a vision-language model that sees instruction, source and result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from wfm_ds.types import SOURCES
from wfm_reward.base import MediaItem, Range, RewardError, Score
from wfm_reward.rewards._edit_prompts import PLACEHOLDERS, TEMPLATES, ReplyError
from wfm_reward.rewards._vlm import VlmReward, image_content

PLACEHOLDER = re.compile(r"(\{(?:instruction|source|result)\})")
UNIT = Range(0.0, 1.0)


class EditJudge(VlmReward):
    """Score of an edit, 0 to 1, from a vision-language model that sees the instruction, the source and the result.

    `template` selects the questions and the format of the replies. `scores`, for any model: two scores from 0 to 10
    (instruction followed, everything else preserved), combined by their geometric mean. `edit_score`, for EditScore and
    UnifiedReward-Edit: scores from 0 to 25 for success, overediting, naturalness and artifacts, with two requests per
    sample; the score is sqrt(min(success, overediting) * min(naturalness, artifacts)) / 25. `rational_rewards`, for
    RationalRewards: mean of three or four aspects from 1 to 4, scaled to 0 to 1. The reward also reports the parts
    `instruction`, `preservation`, `quality` and `text`, if the template asks for them, each from 0 to 1. A reply
    without scores is a failure.
    """

    name = primary_output = "edit_judge"
    media_types = frozenset({"image"})
    outputs: ClassVar = {
        "edit_judge": UNIT,
        "instruction": UNIT,
        "preservation": UNIT,
        "quality": UNIT,
        "text": UNIT,
    }
    sees_images = True

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str,
        template: str = "scores",
        prompts: Mapping[str, str] | None = None,
        max_tokens: int = 2048,
        **options: Any,
    ) -> None:
        """template: scores, edit_score or rational_rewards. prompts: {name: text} of prompts that replace those of the
        template: `edit`, `quality` (only edit_score) or `system`. The texts contain {instruction}, {source} and
        {result}. max_tokens: maximum length of a reply.

        Raises RewardError if an option is invalid.
        """
        super().__init__(device, model=model, **options)
        if template not in TEMPLATES:
            raise RewardError(f"reward {self.name}: template is {template!r}; it must be {', '.join(TEMPLATES)}")
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise RewardError(f"reward {self.name}: max_tokens is {max_tokens!r}; it must be an integer >= 1")
        self.template, self.max_tokens = TEMPLATES[template], max_tokens
        own = dict(prompts or {})
        names = {"system", *self.template.prompts}
        for name, text in own.items():
            if name not in names or not isinstance(text, str):
                known = ", ".join(sorted(names))
                raise RewardError(f"reward {self.name}: prompts.{name} is not a text of template {template}: {known}")
            if missing := [word for word in PLACEHOLDERS[name] if word not in text]:
                raise RewardError(f"reward {self.name}: prompts.{name} must contain {' and '.join(missing)}")
        self.prompts = {**self.template.prompts, **own}

    def rate_item(self, item: MediaItem) -> Score:
        if not any(name in item.images for name in SOURCES):
            return item.fail("the sample has no source image")
        replies = {}
        for question, prompt in self.prompts.items():
            if question == "system":
                continue
            messages = [{"role": "user", "content": fill_prompt(prompt, item)}]
            if "system" in self.prompts:
                messages.insert(0, {"role": "system", "content": self.prompts["system"]})
            replies[question] = self.request_text(messages, max_tokens=self.max_tokens).rpartition("</think>")[2]
        try:
            parts = self.template.parse(replies)
        except ReplyError as error:
            return item.fail(str(error))
        return item.score(self.template.combine(parts), **parts)


def fill_prompt(prompt: str, item: MediaItem) -> list[dict[str, Any]]:
    """Return the content of a user message: the prompt with the item's instruction and images as PNG."""
    content: list[dict[str, Any]] = []
    for piece in PLACEHOLDER.split(prompt):
        if piece == "{source}":
            content += [image_content(item.images[name]) for name in SOURCES if name in item.images]
        elif piece == "{result}":
            content.append(image_content(item.frames[0]))
        elif piece:
            text = item.prompt if piece == "{instruction}" else piece
            if content and content[-1]["type"] == "text":
                content[-1]["text"] += text
            else:
                content.append({"type": "text", "text": text})
    return content
