"""Tiny Qwen3-VL: vision features enter two text layers, and the text contains timestamps of video frames."""

from __future__ import annotations

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from wfm_ds.models.tiny.parts.chat import TinyLanguageModel
from wfm_ds.models.tiny.parts.qwen3 import qwen3_folder

SEED = 22


def build() -> TinyLanguageModel:
    """Return the model and its processors. As in the small released models, the embeddings are tied."""
    tied = {"tie_word_embeddings": True}
    return qwen3_folder(Qwen3VLForConditionalGeneration, Qwen3VLConfig, SEED, text=tied, **tied)
