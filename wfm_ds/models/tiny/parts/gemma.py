"""A tiny Gemma-2 text encoder and its tokenizer."""

from __future__ import annotations

from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.vocabulary import WORDS, merge_results, prefix_merges
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

WORD_START = "\u2581"  # the tokenizer's symbol for a space. The first word has none and is split into characters
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")


def gemma_tokenizer() -> GemmaTokenizer:
    """Return a tokenizer with 487 ids.

    They are special tokens, bytes, the symbol for the start of a word, ASCII characters and words. Like the released
    tokenizer, it prepends <bos>.
    """
    merges = list(dict.fromkeys(pair for word in WORDS for pair in prefix_merges(WORD_START, word)))
    bytes_of_others = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = [*SPECIAL_TOKENS, *bytes_of_others, WORD_START, *characters, *merge_results(merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def gemma_encoder(vocab_size: int, seed: int) -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        max_position_embeddings=1024,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
    )
    with temporary_seed(seed):
        return redraw_text_weights(Gemma2Model(config), seed)
