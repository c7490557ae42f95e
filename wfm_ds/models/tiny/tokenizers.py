"""Tokenizers of the tiny pipelines, with ids that are the same on every machine.

Every word of WORDS is one token. All other text is split into bytes or single characters.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import CLIPTokenizer, GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, T5Tokenizer

WORDS = (
    *("a", "the", "digit", "on", "in", "of", "and", "with"),
    *("white", "black", "red", "green", "blue", "yellow", "circle", "square", "triangle"),
    *("background", "photo", "text", "saying", "hello"),
    *("moving", "left", "right", "up", "down", "video", "robot", "cat"),
    *string.digits,
)
WORDS_WITHOUT_DIGITS = tuple(word for word in WORDS if word not in string.digits)
SENTENCEPIECE_SPACE, BPE_SPACE = "\u2581", "\u0120"  # the symbols for a space before a word
ASCII = [chr(code) for code in range(ord("!"), ord("~") + 1)]

GEMMA_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
QWEN_SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
# Pipelines prepend these words to every prompt. Each word is one token, so a short sequence has room for the prompt.
QWEN_SYSTEM_WORDS = (
    *("You", "are", "helpful", "assistant", "who", "will", "provide", "prompts", "to", "an", "image", "generator"),
    *("system", "user"),
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
VISION_TEMPLATE = "<|vision_start|><|{}_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n"
    "{% if turn['content'] is string %}{{ turn['content'] }}{% else %}{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}" + VISION_TEMPLATE.format("image") + "{% elif part['type'] == 'video' %}"
    "" + VISION_TEMPLATE.format("video") + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
# A space before each text makes its first word one token.
MISTRAL_TEXTS = "{% for part in message['content'] %}{{ ' ' + part['text'] }}{% endfor %}"
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]" + MISTRAL_TEXTS + "[/SYSTEM_PROMPT]"
    "{% else %}[INST]" + MISTRAL_TEXTS + "[/INST]{% endif %}{% endfor %}"
)
MISTRAL_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"  # words with their space, single digits


def suffix_merges(word: str, mark: str) -> list[tuple[str, str]]:
    """Return the BPE merges that build `word` followed by `mark`, from right to left.

    For the word "red" and the mark "</w>", the merges are ("e", "d</w>"), ("r", "ed</w>").
    """
    *head, tail = [*word[:-1], word[-1] + mark]
    pairs = []
    for character in reversed(head):
        pairs.append((character, tail))
        tail = character + tail
    return pairs


def prefix_merges(mark: str, words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the distinct BPE merges that build `mark` followed by each word, from left to right.

    For the mark "_" and the word "red", the merges are ("_", "r"), ("_r", "e"), ("_re", "d").
    """
    pairs = [((mark + word)[: end + len(mark)], word[end]) for word in words for end in range(len(word))]
    return list(dict.fromkeys(pairs))


def number_tokens(*tokens: str, merges: Iterable[tuple[str, str]], last: Iterable[str] = ()) -> dict[str, int]:
    """Return {token: id}. The ids follow this order: `tokens`, the tokens that the merges create, `last`."""
    created = dict.fromkeys(left + right for left, right in merges)
    return {token: index for index, token in enumerate([*tokens, *created, *last])}


def byte_symbols() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def clip_tokenizer(model_max_length: int) -> CLIPTokenizer:
    """Return a CLIP tokenizer with 614 ids: bytes, bytes at the end of a word, merged words, start and end tokens."""
    merges = list(dict.fromkeys(pair for word in WORDS for pair in suffix_merges(word, "</w>")))
    symbols, ends = byte_symbols(), ("<|startoftext|>", "<|endoftext|>")
    vocabulary = number_tokens(*symbols, *(symbol + "</w>" for symbol in symbols), merges=merges, last=ends)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=model_max_length)


def gemma_tokenizer() -> GemmaTokenizer:
    """Return a Gemma tokenizer with 487 ids: special tokens, bytes, ASCII characters and words. It prepends <bos>.

    The first word of a text is split into characters.
    """
    merges = prefix_merges(SENTENCEPIECE_SPACE, WORDS)
    bytes_of_others = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = number_tokens(*GEMMA_SPECIAL_TOKENS, *bytes_of_others, SENTENCEPIECE_SPACE, *ASCII, merges=merges)
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def t5_tokenizer() -> T5Tokenizer:
    """Return a T5 tokenizer with 138 ids."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (SENTENCEPIECE_SPACE, -4.0)]  # T5 fixes the first 3 ids
    words = [(SENTENCEPIECE_SPACE + word, -2.0) for word in WORDS]
    return T5Tokenizer(vocab=[*special, *words, *((character, -8.0) for character in ASCII)], extra_ids=0)


def qwen_tokenizer(
    *, add_prefix_space: bool = True, more_words: Sequence[str] = (), template: str = QWEN_TEMPLATE
) -> Qwen2Tokenizer:
    """Return a tokenizer with 435 ids: bytes, words with a leading space, special tokens. Each digit is one token.

    add_prefix_space: put a space before the text, so that the first word is one token. more_words: words that become
    one token each. template: the chat template.
    """
    merges = prefix_merges(BPE_SPACE, [*WORDS_WITHOUT_DIGITS, *QWEN_SYSTEM_WORDS, *more_words])
    tokenizer = Qwen2Tokenizer(
        vocab=number_tokens(*byte_symbols(), merges=merges, last=QWEN_SPECIAL_TOKENS),
        merges=merges,
        add_prefix_space=add_prefix_space,
        eos_token="<|im_end|>",
        additional_special_tokens=list(QWEN_SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer for vision-language models. It prepends no space, so decoding returns the encoded text."""
    return qwen_tokenizer(add_prefix_space=False, template=CHAT_TEMPLATE)


def boundary_token_ids(tokenizer: Any) -> dict[str, int]:
    names = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def vision_token_ids(tokenizer: Any) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def mistral_tokenizer(more_words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    merges = prefix_merges(BPE_SPACE, [*WORDS_WITHOUT_DIGITS, *more_words])
    vocabulary = number_tokens(*MISTRAL_SPECIAL_TOKENS, *byte_symbols(), merges=merges)
    bpe = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(MISTRAL_SPLIT), behavior="isolated"),
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
        additional_special_tokens=list(MISTRAL_SPECIAL_TOKENS[3:]),
    )
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer
