"""A tiny Mistral3 encoder and its tokenizer."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.vocabulary import WORDS, byte_symbols, merge_results, prefix_merges
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

WORD_START = "\u0120"  # the space symbol of byte-level BPE
SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
# A space before each text makes its first word one token.
TEXTS_TEMPLATE = "{% for part in message['content'] %}{{ ' ' + part['text'] }}{% endfor %}"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]" + TEXTS_TEMPLATE + "[/SYSTEM_PROMPT]"
    "{% else %}[INST]" + TEXTS_TEMPLATE + "[/INST]{% endif %}{% endfor %}"
)
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"  # words with their space, single digits


def mistral_tokenizer(more_words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with bytes, words with a leading space, special tokens, and one token for each extra word."""
    words = [*(word for word in WORDS if word not in string.digits), *more_words]
    merges = list(dict.fromkeys(pair for word in words for pair in prefix_merges(WORD_START, word)))
    vocabulary = {
        token: index for index, token in enumerate([*SPECIAL_TOKENS, *byte_symbols(), *merge_results(merges)])
    }
    bpe = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def mistral_encoder(
    tokenizer: PreTrainedTokenizerFast, layers: int, width: int, seed: int
) -> Mistral3ForConditionalGeneration:
    """Return a random encoder with `layers` text layers and a minimal vision tower."""
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "sliding_window": None,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    with temporary_seed(seed):
        encoder: Mistral3ForConditionalGeneration = redraw_text_weights(Mistral3ForConditionalGeneration(config), seed)
    return encoder
