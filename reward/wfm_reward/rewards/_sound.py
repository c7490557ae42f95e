"""The base class of rewards that hear the sound of videos, and the conversion of sound to the input of audio models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import HubFiles, Reward

SILENCE = 1e-4  # largest amplitude of sound that counts as silent


class SoundReward(Reward):
    """Base class of rewards that hear the sound of videos. Subclasses must fail silent videos (`is_silent`)."""

    media_types = frozenset({"video"})
    needs_sound = True
    hub_files: ClassVar[Mapping[str, HubFiles]] = {"model": "model"}

    def __init__(self, device: str = "cpu", *, model: str, dtype: str = "float32", **options: Any) -> None:
        super().__init__(device, **options)
        self.model, self.dtype = model, dtype


def is_silent(sound: npt.NDArray[np.float32]) -> bool:
    return bool(np.abs(sound).max() < SILENCE)


def to_mono(sound: npt.NDArray[np.float32], rate: int, target: int) -> npt.NDArray[np.float32]:
    """Return the mean of the channels at another sample rate, [samples], with a polyphase filter.

    sound: [channels, samples]. rate, target: samples per second of the argument and of the result.
    """
    from scipy.signal import resample_poly

    mono: npt.NDArray[np.float32] = sound.mean(axis=0)
    if rate == target:
        return mono
    divisor = math.gcd(rate, target)
    resampled: npt.NDArray[np.float32] = resample_poly(mono, target // divisor, rate // divisor).astype(np.float32)
    return resampled
