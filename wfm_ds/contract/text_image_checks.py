"""Checks of families with a text encoder that also sees images (DiffusionModel.text_inputs)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds.contract.case import PROMPTS
from wfm_ds.contract.family_under_test import (
    LARGER_WEIGHTS,
    NO_CASE_INPUTS,
    CheckNotApplicable,
    FamilyUnderTest,
    fail_unless,
    require_close,
)
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import NegativeText
from wfm_ds.storage.tensor_store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wfm_ds.models.assets.text_cache import Text
    from wfm_ds.types import Conditioning

MIN_IMAGE_EFFECT = 1e-3  # minimum change of embeddings, which have magnitude 1


def check_images_change_embeddings(subject: FamilyUnderTest) -> None:
    """Check that a prompt and a negative prompt have different embeddings for two samples with different images."""
    for text in _list_texts(subject):
        one, other = (_encode_alone(subject, text, sample) for sample in (0, 1))
        name = max(one, key=lambda key: one[key].ndim)  # the embedding, not its mask
        if one[name].shape != other[name].shape:
            continue
        difference = float((one[name] - other[name]).abs().max())
        fail_unless(
            difference > MIN_IMAGE_EFFECT,
            f"other images change the embedding of {text} by only {difference:.1g}; {LARGER_WEIGHTS}",
        )


def check_text_cache_with_images(subject: FamilyUnderTest) -> None:
    """Check that the text cache, in memory and on disk, returns the embedding of each text with its own images.

    Swapping the images of two samples must swap their embeddings.
    """
    texts = [(text, sample) for text in _list_texts(subject) for sample in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the second cache reads the embeddings from the disk
            cache = TextCache(subject.model_with_inputs, store=TensorStore(Path(folder)))
            for order in (texts, texts[::-1]):  # the second time, the embeddings are in memory
                got = cache.encode([_attach_images(subject, text, sample) for text, sample in order])
                rows = [_encode_alone(subject, *item) for item in order]
                want = subject.model_with_inputs.stack_conditioning(rows)
                for name, tensor in want.items():
                    require_close(f"the cached {name} of texts with images", got[name], tensor, subject.case.tolerance)


def _list_texts(subject: FamilyUnderTest) -> Sequence[str | NegativeText]:
    if not subject.model.text_inputs:
        raise CheckNotApplicable("the text encoder sees no images")
    fail_unless(subject.case.inputs is not None, NO_CASE_INPUTS)
    return PROMPTS[0], NegativeText(PROMPTS[0])


def _attach_images(subject: FamilyUnderTest, text: str | NegativeText, sample: int) -> Text:
    (attached,) = subject.model_with_inputs.attach_images([text], [subject.sample_inputs()[sample]])
    return attached


def _encode_alone(subject: FamilyUnderTest, text: str | NegativeText, sample: int) -> Conditioning:
    prompt, is_negative = (text.text, True) if isinstance(text, NegativeText) else (text, False)
    return subject.encode_texts(
        subject.model_with_inputs, [prompt], [subject.sample_inputs()[sample]], negative=is_negative
    )
