"""Convert the sound of videos to the input of audio models."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

SILENCE = 1e-4  # largest amplitude of sound that counts as silent


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
