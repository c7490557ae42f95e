"""Helpers of the commands that write demo data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from wfm_ds.errors import DataError


def data_parser(description: str, out_dir_help: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("out_dir", type=Path, help=out_dir_help)
    return p


def require_new_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder: use a new folder or remove it")


def write_json_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SOUND_RATE = 16000  # samples per second


def write_video(
    path: Path, frames: npt.NDArray[np.uint8], fps: int, sound: npt.NDArray[np.int16] | None = None
) -> None:
    """Write RGB frames [T,H,W,3] as a lossless video (FFV1 in Matroska). The file is bitwise reproducible.

    sound: [samples] of one channel, SOUND_RATE samples per second. None: no sound.
    """
    options = {"fflags": "+bitexact"}  # no random identifier in the container
    with av.open(str(path), "w", format="matroska", options=options) as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        stream.codec_context.thread_count = 1
        track = None if sound is None else container.add_stream("pcm_s16le", rate=SOUND_RATE, layout="mono")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode(None))
        if sound is not None and track is not None:
            samples = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
            samples.sample_rate, samples.pts = SOUND_RATE, 0
            container.mux(track.encode(samples))
            container.mux(track.encode(None))
