"""Hand-made vocabularies of the tiny pipelines: no training, so the ids are the same on every run and machine.

Every word of WORDS is one token of a tokenizer. Other text falls back to bytes or to single characters.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from tokenizers.pre_tokenizers import ByteLevel

WORDS = (
    *("a", "the", "digit", "on", "in", "of", "and", "with"),
    *("white", "black", "red", "green", "blue", "yellow", "circle", "square", "triangle"),
    *("background", "photo", "text", "saying", "hello"),
    *("moving", "left", "right", "up", "down", "video", "robot", "cat"),
    *string.digits,
)


def chain_to_end(word: str, mark: str) -> list[tuple[str, str]]:
    """The BPE merges that build `word` with a mark at its end, from the right: ("e", "d</w>"), ("r", "ed</w>").

    Every pair contains the mark, so that chains of different words cannot disturb each other.
    """
    *head, tail = [*word[:-1], word[-1] + mark]
    pairs = []
    for character in reversed(head):
        pairs.append((character, tail))
        tail = character + tail
    return pairs


def chain_from_start(mark: str, word: str) -> list[tuple[str, str]]:
    """The same for a mark at the start, from the left: ("_", "r"), ("_r", "e"), ("_re", "d")."""
    head, pairs = mark, []
    for character in word:
        pairs.append((head, character))
        head += character
    return pairs


def joined(merges: Iterable[tuple[str, str]]) -> list[str]:
    """List what the merges make, each once, in order."""
    return list(dict.fromkeys(left + right for left, right in merges))


def byte_symbols() -> list[str]:
    """The 256 characters that stand for bytes; the library's set would come in the order of the hash seed."""
    return sorted(ByteLevel.alphabet())
