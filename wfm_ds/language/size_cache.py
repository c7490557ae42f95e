"""Cache of the token counts of conversations, for runs with the same annotations, model and settings.

    CACHE/lengths/<hash>.npy    int32 [conversations, 3]: tokens, media tokens, labelled tokens; 0 0 0 if unknown

The hash covers the annotation files, the tokenizer with its chat template, the image processor and all settings that
change the tokens. It does not cover the images and videos. If the size of an image or video has changed when it is
read, its conversation is skipped.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

FORMAT = 1
SIZE_SETTINGS = ("media_path", "system_prompt", "max_tokens", "too_long", "pixels", "video")


class ConversationSize(NamedTuple):
    """The token counts of a conversation: all tokens, image and video tokens, and labelled tokens."""

    tokens: int
    media: int
    labelled: int


UNKNOWN_SIZE = ConversationSize(0, 0, 0)


def cache_key(recipe: Recipe, digest: str, tokenizer: Any, image_processor: Any) -> str:
    """Return a hash of everything that the token counts depend on. digest: hash of the annotations."""
    parts = {
        "format": FORMAT,
        "annotations": digest,
        "data": recipe.data.model_dump(mode="json", include=set(SIZE_SETTINGS)),
        "train_on": recipe.language_settings.train_on,
        "template": tokenizer.chat_template,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "image_processor": image_processor.to_json_string(),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class SizeCache:
    """File with the token counts of all conversations for one cache key."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self.file = cache_dir / "lengths" / f"{key}.npy"

    def read(self, count: int) -> list[ConversationSize]:
        """Return the sizes of `count` conversations. A size that is not cached is UNKNOWN_SIZE.

        If the file is invalid, all sizes are UNKNOWN_SIZE.
        """
        try:
            array = np.load(self.file, allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError, OSError):
            return [UNKNOWN_SIZE] * count
        if array.shape != (count, 3):
            return [UNKNOWN_SIZE] * count
        return [ConversationSize(*size) for size in array.tolist()]

    def write(self, sizes: Sequence[ConversationSize]) -> None:
        """Write the sizes. A write error is only logged."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic.new_file(self.file) as part, part.open("wb") as out:
                np.save(out, np.array(sizes, np.int32).reshape(-1, 3))
        except OSError as error:
            log.warning("%s cannot be written (%s); the next run measures lengths again", self.file, error)
