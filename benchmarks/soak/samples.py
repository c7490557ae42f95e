"""Samples and their scores. The id of a sample determines both, so that any process can check them."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.rewards.jpeg import JpegIncompressibility, jpeg_kb

SIDE = 128
GROUPS, GROUP_SIZE, CHUNK = 10, 10, 5  # groups in a step, samples in a group, samples in a chunk (one task)
PER_STEP = GROUPS * GROUP_SIZE


def sample_ids(step: int, group: int, first: int, stop: int) -> list[str]:
    return [f"{step}/{group}/{number}" for number in range(first, stop)]


def sample_index(step: int, group: int, number: int) -> int:
    """Return the number of a sample among all samples; step 1 is the first step."""
    return ((step - 1) * GROUPS + group) * GROUP_SIZE + number


def make_image(sample_id: str) -> npt.NDArray[np.uint8]:
    """Return a noise image, uint8 [SIDE,SIDE,3]."""
    return np.random.default_rng(list(sample_id.encode())).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def make_prompt(sample_id: str) -> str:
    return f"noise number {sample_id}"


def compute_scores(sample_id: str, pixels: npt.NDArray[np.uint8]) -> dict[str, float]:
    """Return the correct scores of a sample, by reward."""
    item = MediaItem(sample_id=sample_id, frames=pixels[None], fps=None, prompt=make_prompt(sample_id), metadata={})
    return {CHECKSUM: _item_checksum(item), JpegIncompressibility.name: jpeg_kb(item)}


def append_count(journal: Path, count: int) -> None:
    """Add to the size of a file, atomically even if this process is killed or others append."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, b"." * count)
    finally:
        os.close(file)


def read_count(journal: Path) -> int:
    return journal.stat().st_size


def _item_checksum(item: MediaItem) -> float:
    return float(zlib.crc32(item.prompt.encode(), zlib.crc32(item.frames.tobytes())))


class Checksum(Reward):
    """A checksum of all pixels and the prompt, unique to each sample. `journal` counts the scored items."""

    name = "checksum"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"checksum": Range(0.0, 2.0**32)}
    primary_output = "checksum"

    def __init__(self, device: str = "cpu", *, journal: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.journal = Path(journal)

    def score(self, batch: MediaBatch) -> list[Score]:
        scores = [item.score(_item_checksum(item)) for item in batch]
        append_count(self.journal, len(batch))
        return scores


CHECKSUM = f"{Checksum.__module__}:{Checksum.__name__}"
