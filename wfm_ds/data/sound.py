"""Decoding of the sound of video clips."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.container import InputContainer

from wfm_ds.data.pixels import BadMedia
from wfm_ds.data.samples import Media

SEEK_MARGIN_S = 0.5  # decoders of compressed sound need earlier packets to be exact


def load_sound(
    media: Media, container: InputContainer, start: float, duration: float, rate: int
) -> npt.NDArray[np.float32]:
    """Decode the sound of a clip to float32 stereo [2, round(duration * rate)] in [-1, 1].

    container: the opened file. start: time of the clip's first frame in seconds. rate: samples per second of the
    result. Parts of the clip without sound are silent, such as the end of a file with less sound than video. Raises
    BadMedia with reason `no_sound` if the whole clip has none.
    """
    stream = next(iter(container.streams.audio), None)
    if stream is None or not stream.rate or stream.time_base is None:
        raise no_sound_error(media)
    # One channel is repeated below: the resampler would make it quieter.
    layout, channels = ("mono", 1) if stream.channels == 1 else ("stereo", 2)
    container.seek(max(0, int((start - SEEK_MARGIN_S) / stream.time_base)), stream=stream)
    stored, to_float, file_rate, is_empty, following = None, None, stream.rate, True, 0
    for frame in container.decode(stream):
        if frame.time is None:
            continue
        if stored is None:  # the rate of decoded sound may differ from the rate in the header (HE-AAC)
            file_rate = frame.sample_rate
            stored = np.zeros((channels, round(duration * file_rate)), np.float32)
            to_float = AudioResampler(format="fltp", layout=layout, rate=file_rate)
        offset = round((frame.time - start) * file_rate)
        # Matroska rounds times to milliseconds. A gap or overlap would be audible.
        if abs(offset - following) <= math.ceil(stream.time_base * file_rate) + 1:
            offset = following
        following = offset + frame.samples
        if offset >= stored.shape[1]:
            break
        assert to_float is not None
        samples = np.concatenate([part.to_ndarray() for part in to_float.resample(frame)], axis=1)
        first, last = max(0, -offset), min(samples.shape[1], stored.shape[1] - offset)
        if first < last:
            stored[:, offset + first : offset + last] = samples[:, first:last]
            is_empty = False
    if stored is None or is_empty:
        raise BadMedia("no_sound", media.name, f"has no sound from {start:.2f} s to {start + duration:.2f} s")
    return resample(stored.repeat(2 // channels, axis=0), file_rate, rate, round(duration * rate))


def no_sound_error(media: Media) -> BadMedia:
    return BadMedia("no_sound", media.name, "has no sound, but the model is trained on video with sound")


def resample(sound: npt.NDArray[np.float32], rate: int, new_rate: int, count: int) -> npt.NDArray[np.float32]:
    """Convert stereo sound [2, samples] from `rate` to `new_rate` samples per second, float32 [2, count].

    The end is cut or padded with silence.
    """
    if rate != new_rate:
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = rate, 0
        resampler = AudioResampler(format="fltp", layout="stereo", rate=new_rate)
        parts = [part.to_ndarray() for part in [*resampler.resample(frame), *resampler.resample(None)]]
        sound = np.concatenate(parts, axis=1)
    return np.pad(sound[:, :count], ((0, 0), (0, max(0, count - sound.shape[1]))))
