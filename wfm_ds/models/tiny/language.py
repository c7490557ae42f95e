"""Tiny random vision-language models for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2VLImageProcessorPil

from wfm_ds.models.tiny.encoders import qwen3vl_model, qwen25vl_encoder
from wfm_ds.models.tiny.tokenizers import chat_tokenizer

QWEN25_SEED, QWEN3_SEED, QWEN3_MOE_SEED = 21, 22, 23
QWEN25_TOKEN_SIDE, QWEN3_TOKEN_SIDE, QWEN3_PATCH = 28, 32, 16  # pixels; a token is four patches
MAX_TOKENS = 16  # maximum number of tokens of an image
TIED = {"tie_word_embeddings": True}  # as in the small released models
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True)
class TinyLanguageModel:
    model: Any
    tokenizer: Any
    image_processor: Any

    def save_pretrained(self, out: Path) -> None:
        for part in (self.model, self.tokenizer, self.image_processor):
            part.save_pretrained(out)


def build_language_model(name: str) -> TinyLanguageModel:
    """Return a model from LANGUAGE_FAMILIES in float32 and evaluation mode."""
    tokenizer = chat_tokenizer()
    if name == "qwen25vl":
        model = qwen25vl_encoder(tokenizer, QWEN25_SEED)
    elif name == "qwen3vl":
        model = qwen3vl_model(tokenizer, "Qwen3VL", QWEN3_SEED, text=TIED, **TIED)
    else:
        model = qwen3vl_model(tokenizer, "Qwen3VLMoe", QWEN3_MOE_SEED, text=EXPERTS)
    side, options = (QWEN25_TOKEN_SIDE, {}) if name == "qwen25vl" else (QWEN3_TOKEN_SIDE, {"patch_size": QWEN3_PATCH})
    size = {"shortest_edge": side * side, "longest_edge": MAX_TOKENS * side * side}
    return TinyLanguageModel(model, tokenizer, Qwen2VLImageProcessorPil(size=size, **options))
