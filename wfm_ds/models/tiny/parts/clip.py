"""A tiny CLIP text encoder and its tokenizer."""

from __future__ import annotations

from typing import Any

from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.vocabulary import WORDS, byte_symbols, merge_results, suffix_merges
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

WORD_END = "</w>"


def clip_tokenizer(model_max_length: int) -> CLIPTokenizer:
    """Return a tokenizer with 614 ids.

    They are bytes, bytes at the end of a word, merged words, and the start and end of a text.
    """
    merges = list(dict.fromkeys(pair for word in WORDS for pair in suffix_merges(word, WORD_END)))
    symbols = byte_symbols()
    words = merge_results(merges)
    tokens = [*symbols, *(symbol + WORD_END for symbol in symbols), *words, "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=model_max_length)


def clip_encoder(tokenizer: Any, max_length: int, seed: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # used by pooling
        pad_token_id=tokenizer.pad_token_id,
    )
    with temporary_seed(seed):
        return redraw_text_weights(CLIPTextModelWithProjection(config), seed)
