"""Handwritten vocabularies of the tiny pipelines. No vocabulary is trained, so ids are the same on every machine.

Every word of WORDS is one token. All other text is split into bytes or single characters.
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


def suffix_merges(word: str, mark: str) -> list[tuple[str, str]]:
    """Return the BPE merges that build `word` followed by `mark`, from right to left.

    For "red" and "</w>" they are ("d", "</w>"), ("e", "d</w>"), ("r", "ed</w>"). Every pair contains the mark, so
    merges of different words do not interfere.
    """
    *head, tail = [*word[:-1], word[-1] + mark]
    pairs = []
    for character in reversed(head):
        pairs.append((character, tail))
        tail = character + tail
    return pairs


def prefix_merges(mark: str, word: str) -> list[tuple[str, str]]:
    """Return the BPE merges that build `mark` followed by `word`, from left to right.

    For "_" and "red" they are ("_", "r"), ("_r", "e"), ("_re", "d").
    """
    head, pairs = mark, []
    for character in word:
        pairs.append((head, character))
        head += character
    return pairs


def merge_results(merges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the distinct tokens that the merges create, in order."""
    return list(dict.fromkeys(left + right for left, right in merges))


def byte_symbols() -> list[str]:
    """Return the 256 characters that represent bytes. They are sorted, because the library returns an unordered set."""
    return sorted(ByteLevel.alphabet())
