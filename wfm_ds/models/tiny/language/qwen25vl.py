"""Tiny Qwen2.5-VL: patches of 14 pixels, four patches per token."""

from __future__ import annotations

from transformers import Qwen2VLImageProcessorPil

from wfm_ds.models.tiny.parts.chat import TinyLanguageModel, chat_tokenizer
from wfm_ds.models.tiny.parts.qwen import qwen_encoder

SEED = 21
SIZE = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}


def build() -> TinyLanguageModel:
    tokenizer = chat_tokenizer()
    return TinyLanguageModel(qwen_encoder(tokenizer, SEED).eval(), tokenizer, Qwen2VLImageProcessorPil(size=SIZE))
