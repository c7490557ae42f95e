"""Scoring request of an HTTP client, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Items and the rewards to compute for them. Parsed and validated by `cosmos_protocol` or `json_protocol`."""

    rewards: tuple[str, ...]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    fps: Sequence[float | None]
    media: Sequence[npt.NDArray[Any]]
    """One array per item: image uint8 [H,W,3], video uint8 [T,H,W,3], or latents float16 or float32 [C,T,h,w]."""
    latents: bool
    info: Mapping[str, Any]
    """Information about the received array, for the reply."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.media)
