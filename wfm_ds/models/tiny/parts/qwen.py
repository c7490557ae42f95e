"""A tiny Qwen2.5-VL encoder and its tokenizer."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.vocabulary import WORDS, byte_symbols, merge_results, prefix_merges
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

WORD_START = "\u0120"  # the space symbol of byte-level BPE
# Pipelines prepend these to every prompt. With one token per word a short sequence still fits the prompt.
SYSTEM_WORDS = (
    *("You", "are", "helpful", "assistant", "who", "will", "provide", "prompts", "to", "an", "image", "generator"),
    *("system", "user"),
)
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)


def qwen_tokenizer(*, add_prefix_space: bool = True, more_words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Return a tokenizer with 435 ids: bytes, words with a leading space, special tokens. Each digit is one token.

    add_prefix_space: put a space before the text, so that the first word is one token. more_words: additional words
    that become one token each.
    """
    words = [*(word for word in WORDS if word not in string.digits), *SYSTEM_WORDS, *more_words]
    merges = list(dict.fromkeys(pair for word in words for pair in prefix_merges(WORD_START, word)))
    tokens = [*byte_symbols(), *merge_results(merges), *SPECIAL_TOKENS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        add_prefix_space=add_prefix_space,
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def boundary_token_ids(tokenizer: Any) -> dict[str, int]:
    """Return {bos_token_id, eos_token_id} for the config of a language model."""
    names = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def vision_token_ids(tokenizer: Any) -> dict[str, int]:
    """Return {config key: id} of the image and video tokens for the config of a vision-language model."""
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def qwen_encoder(tokenizer: Any, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a random encoder with two text layers of width 32."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            **boundary_token_ids(tokenizer),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        **vision_token_ids(tokenizer),
    )
    with temporary_seed(seed):
        return redraw_text_weights(Qwen2_5_VLForConditionalGeneration(config), seed)
