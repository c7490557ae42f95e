"""Video files: MP4 for users and tools, GIF for pages that show only images. All videos are uint8 [T,H,W,3]."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import Colorspace
from PIL import Image

VideoArray: TypeAlias = npt.NDArray[np.uint8]
"""[T,H,W,3] uint8, RGB."""

# x264 quality without visible loss. No B-frames: with them, equal frames gave different bytes in about one of a
# hundred small files (the assembler code reads uninitialised memory).
X264_OPTIONS = {"crf": "18", "bf": "0"}
ENCODER_THREADS = 4  # constant, because the bytes would depend on the number of cores
BT709 = 1  # ITU-T H.273 code for primaries, transfer and matrix of HD video; without it, players guess by the size
MIN_GIF_DELAY_MS = 20  # browsers show shorter delays as 100 ms


def check_video(video: VideoArray) -> None:
    """Raise ValueError unless the array is uint8 [T,H,W,3] with T, H, W > 0."""
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or video.size == 0:
        raise ValueError(f"a video must be uint8 [T,H,W,3], got {video.dtype} {list(video.shape)}")


def save_mp4(path: Path, video: VideoArray, fps: float) -> None:
    """Write an H.264 video in yuv420p with BT.709 colours, which every browser and player supports.

    Writing the same frames twice gives identical files. yuv420p has one colour per 2 x 2 pixels, so odd sizes are
    padded by repeating the last row or column. Raises ValueError if the video is not uint8 [T,H,W,3] or fps is not
    positive. Raises OSError if writing fails.
    """
    check_video(video)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    height, width = video.shape[1:3]
    odd = ((0, height % 2), (0, width % 2), (0, 0))
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        codec = stream.codec_context
        codec.thread_count = ENCODER_THREADS
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        for image in video:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.pad(image, odd, mode="edge")), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
        container.mux(stream.encode(None))


def encode_gif(video: VideoArray, fps: float) -> bytes:
    """Return an endlessly looping animated GIF with at most 50 fps.

    Raises ValueError if the video is not uint8 [T,H,W,3] or fps is not positive.
    """
    check_video(video)
    if not fps > 0:
        raise ValueError(f"fps must be positive, got {fps}")
    # 256 colours per frame. Pillow's default quantisation is slightly better but a hundred times slower.
    fast_method = Image.Quantize.FASTOCTREE
    first, *others = [Image.fromarray(image).quantize(256, method=fast_method) for image in video]
    delay_ms = max(MIN_GIF_DELAY_MS, 10 * round(100 / fps))  # the unit of the format is 1/100 second
    buffer = io.BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=others, duration=delay_ms, loop=0)
    return buffer.getvalue()
