"""Helpers of the commands that write demo data."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from wfm_ds.errors import DataError


def data_parser(name: str, description: str, out_dir_help: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog=f"wfm data {name}", description=description)
    p.add_argument("out_dir", type=Path, help=out_dir_help)
    return p


def require_new_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder: use a new folder or remove it")


def write_video(path: Path, frames: npt.NDArray[np.uint8], fps: int) -> None:
    """Write RGB frames [T,H,W,3] as a lossless video (FFV1 in Matroska). The file is bitwise reproducible."""
    options = {"fflags": "+bitexact"}  # no random identifier in the container
    with av.open(str(path), "w", format="matroska", options=options) as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode(None))
