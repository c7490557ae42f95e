"""Tiny Qwen3-VL: vision features enter two layers, and video frames have timestamps."""

from __future__ import annotations

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from wfm_ds.models.tiny.parts.chat import TinyLanguageModel
from wfm_ds.models.tiny.parts.qwen3 import qwen3_folder

SEED = 22


def build() -> TinyLanguageModel:
    """Return the model, with tied embeddings like the small released models, and its processors."""
    tied = {"tie_word_embeddings": True}
    return qwen3_folder(Qwen3VLForConditionalGeneration, Qwen3VLConfig, SEED, text=tied, **tied)
