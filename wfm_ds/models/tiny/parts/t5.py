"""A tiny T5 encoder and its tokenizer."""

from __future__ import annotations

from transformers import T5Config, T5EncoderModel, T5Tokenizer

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.vocabulary import WORDS
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

WORD_START = "\u2581"  # the word mark of SentencePiece: "lower one eighth block"


def t5_tokenizer() -> T5Tokenizer:
    """Return a tokenizer with 138 ids. The score of a word is higher than that of its characters.

    Scores are log-probabilities. They decide how a text is split into tokens.
    """
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (WORD_START, -4.0)]  # T5 fixes the first three ids
    words = [(WORD_START + word, -2.0) for word in WORDS]
    characters = [(chr(code), -8.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=[*special, *words, *characters], extra_ids=0)


def t5_encoder(vocab_size: int, seed: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    with temporary_seed(seed):
        return redraw_text_weights(T5EncoderModel(config), seed)
