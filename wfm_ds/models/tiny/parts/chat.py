"""Shared code of tiny vision-language models: a chat template in Qwen's format, and a model with its processors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen2Tokenizer

from wfm_ds.models.tiny.parts.qwen import qwen_tokenizer

VISION_TEMPLATE = "<|vision_start|><|{}_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n"
    "{% if turn['content'] is string %}{{ turn['content'] }}{% else %}{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}" + VISION_TEMPLATE.format("image") + "{% elif part['type'] == 'video' %}"
    "" + VISION_TEMPLATE.format("video") + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> Qwen2Tokenizer:
    """Return a tiny tokenizer that adds no space before the text, so that decoding the tokens returns the same text."""
    tokenizer = qwen_tokenizer(add_prefix_space=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@dataclass(frozen=True, slots=True)
class TinyLanguageModel:
    """A vision-language model, its tokenizer and its image processor."""

    model: PreTrainedModel
    tokenizer: Any
    image_processor: Any

    def save_pretrained(self, out: Path) -> None:
        for part in (self.model, self.tokenizer, self.image_processor):
            part.save_pretrained(out)
