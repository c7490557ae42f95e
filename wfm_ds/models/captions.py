"""Texts as a family encodes them: some pipelines state size, duration and what else a sample is told in the prompt.

The text cache knows captions alone, so its keys stay texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from wfm_ds.models.base import DiffusionModel, NegativeText

Text: TypeAlias = str | NegativeText


def captioned(
    model: DiffusionModel,
    texts: Sequence[Text],
    size: tuple[int, int],
    num_frames: int,
    inputs: Sequence[Collection[str]],
) -> list[Text]:
    """These texts for pixels of this size (height, width). inputs: names of what each sample is told besides."""
    found: list[Text] = []
    for text, told in zip(texts, inputs, strict=True):
        if isinstance(text, NegativeText):
            found.append(NegativeText(model.caption(text.text, *size, num_frames, negative=True, inputs=told)))
        else:
            found.append(model.caption(text, *size, num_frames, inputs=told))
    return found
