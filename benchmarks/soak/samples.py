"""Samples and their scores: both follow from a sample's id, so that any process can check them."""

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
GROUPS, GROUP_SIZE, CHUNK = 10, 10, 5  # of a step; a chunk is a task
PER_STEP = GROUPS * GROUP_SIZE


def sample_ids(step: int, group: int, first: int, stop: int) -> list[str]:
    return [f"{step}/{group}/{number}" for number in range(first, stop)]


def index(step: int, group: int, number: int) -> int:
    """The number of a sample among all of them; step 1 is the first."""
    return ((step - 1) * GROUPS + group) * GROUP_SIZE + number


def picture(sample_id: str) -> npt.NDArray[np.uint8]:
    """Noise, uint8 [SIDE,SIDE,3]."""
    return np.random.default_rng(list(sample_id.encode())).integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def prompt(sample_id: str) -> str:
    return f"noise number {sample_id}"


def right_scores(sample_id: str, pixels: npt.NDArray[np.uint8]) -> dict[str, float]:
    """The scores that a sample must have, by reward."""
    item = MediaItem(sample_id=sample_id, frames=pixels[None], fps=None, prompt=prompt(sample_id), metadata={})
    return {CHECKSUM: _checksum(item), JpegIncompressibility.name: jpeg_kb(item)}


def note(journal: Path, count: int) -> None:
    """Add to the size of a file, whole also when this process is killed and while others add."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, b"." * count)
    finally:
        os.close(file)


def noted(journal: Path) -> int:
    return journal.stat().st_size


def _checksum(item: MediaItem) -> float:
    return float(zlib.crc32(item.prompt.encode(), zlib.crc32(item.frames.tobytes())))


class Checksum(Reward):
    """A checksum of all pixels and the prompt: a score that no other sample has. `journal` counts the scored items."""

    name = "checksum"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"checksum": Range(0.0, 2.0**32)}
    primary_output = "checksum"

    def __init__(self, device: str = "cpu", *, journal: str, **options: Any) -> None:
        super().__init__(device, **options)
        self.journal = Path(journal)

    def score(self, batch: MediaBatch) -> list[Score]:
        scores = [item.score(_checksum(item)) for item in batch]
        note(self.journal, len(batch))
        return scores


CHECKSUM = f"{Checksum.__module__}:{Checksum.__name__}"
