"""A tiny UMT5 encoder. It uses the tiny tokenizer of T5."""

from __future__ import annotations

from transformers import UMT5Config, UMT5EncoderModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.weights import redraw_text_weights


def umt5_encoder(vocab_size: int, seed: int) -> UMT5EncoderModel:
    config = UMT5Config(vocab_size=vocab_size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    with temporary_seed(seed):
        return redraw_text_weights(UMT5EncoderModel(config), seed)
