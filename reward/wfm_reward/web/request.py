"""A request of a client of the HTTP port, whichever protocol it speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Items and the rewards to compute of each. Built by cosmos.py and plain.py, which check it."""

    rewards: tuple[str, ...]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    fps: Sequence[float | None]
    media: Sequence[npt.NDArray[Any]]
    """One array an item: an image uint8 [H,W,3], a video uint8 [T,H,W,3], or latents float16 or float32 [C,T,h,w]."""
    latents: bool
    info: Mapping[str, Any]
    """Facts about what arrived, for the answer."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.media)
