"""Texts as a family encodes them: some pipelines state size, duration and what else a sample is told in the prompt.

The text cache knows captions alone, so its keys stay texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from wfm_ds.models.base import DiffusionModel, NegativeText

Text: TypeAlias = str | NegativeText


def captioned(model: DiffusionModel, texts: Sequence[Text], size: tuple[int, int], num_frames: int) -> list[Text]:
    """These texts for pixels of this size (height, width)."""
    return [
        NegativeText(model.caption(text.text, *size, num_frames, negative=True))
        if isinstance(text, NegativeText)
        else model.caption(text, *size, num_frames)
        for text in texts
    ]
