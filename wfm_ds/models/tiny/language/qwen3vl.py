"""Qwen3-VL in miniature: features of the vision tower enter two layers, and the frames of a video have times."""

from __future__ import annotations

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from wfm_ds.models.tiny.parts.chat import LanguageFolder
from wfm_ds.models.tiny.parts.qwen3 import qwen3_folder

SEED = 22


def build() -> LanguageFolder:
    """The model in float32, with tied embeddings as the small ones have, and its processors."""
    tied = {"tie_word_embeddings": True}
    return qwen3_folder(Qwen3VLForConditionalGeneration, Qwen3VLConfig, SEED, text=tied, **tied)
