"""Sizes of conversations as they were measured once, for runs with the same annotations, model and settings.

    CACHE/lengths/<hash>.npy    int32 [conversations, 3]: tokens, tokens of media, labelled tokens; 0 0 0 if not known

The hash is of the annotation files, of the tokenizer with its chat template, of the image processor and of all settings
that tokens depend on. Media themselves are not in it: what has another size when it is read is left out there.
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
SETTINGS = ("media_path", "system_prompt", "max_tokens", "too_long", "pixels", "video")


class Size(NamedTuple):
    """Tokens of a conversation."""

    tokens: int
    media: int
    labelled: int


UNKNOWN = Size(0, 0, 0)


def key_of(recipe: Recipe, digest: str, tokenizer: Any, image_processor: Any) -> str:
    """Name what the sizes depend on. digest: of the annotations."""
    parts = {
        "format": FORMAT,
        "annotations": digest,
        "data": recipe.data.model_dump(mode="json", include=set(SETTINGS)),
        "train_on": recipe.language.train_on,
        "template": tokenizer.chat_template,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "image_processor": image_processor.to_json_string(),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class SizeCache:
    """The sizes of one key."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self.file = cache_dir / "lengths" / f"{key}.npy"

    def read(self, count: int) -> list[Size]:
        """The sizes of all conversations; UNKNOWN for those that were not measured, or could not be."""
        try:
            found = np.load(self.file, allow_pickle=False)
        except (FileNotFoundError, ValueError, EOFError, OSError):
            return [UNKNOWN] * count
        if found.shape != (count, 3):
            return [UNKNOWN] * count
        return [Size(*row) for row in found.tolist()]

    def write(self, sizes: Sequence[Size]) -> None:
        """Keep these. A folder that cannot be written costs time, not the run."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic.new_file(self.file) as part, part.open("wb") as out:
                np.save(out, np.array(sizes, np.int32).reshape(-1, 3))
        except OSError as error:
            log.warning("%s cannot be written (%s): lengths are measured again by the next run", self.file, error)
