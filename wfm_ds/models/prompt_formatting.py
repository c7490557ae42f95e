"""Prompt formatting: some pipelines append size, duration or other information to the prompt.

Prompts are formatted before they reach the text cache, so its keys are plain texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from wfm_ds.models.base import DiffusionModel, NegativeText

Text: TypeAlias = str | NegativeText


def format_prompts(model: DiffusionModel, texts: Sequence[Text], size: tuple[int, int], num_frames: int) -> list[Text]:
    """Format prompts and negative prompts as the pipeline does, for this size in pixels (height, width)."""
    return [
        NegativeText(model.format_prompt(text.text, *size, num_frames, negative=True))
        if isinstance(text, NegativeText)
        else model.format_prompt(text, *size, num_frames)
        for text in texts
    ]
