"""Test videos, written with PyAV. Frame i has the red value `level(i)`, so a decoded frame reveals its index."""

import struct
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import Colorspace

STEP = 5  # grey levels between frames: larger than the error of lossy coding
BT709, BT601, UNSPECIFIED = 1, 6, 2  # ITU-T H.273


def level(index):
    return 2 + STEP * index


def index_of(frame):
    """Return the index of a decoded frame [H,W,3]."""
    return round((float(frame[..., 0].mean()) - 2) / STEP)


def write_clip(
    path, count=40, fps=24, size=(32, 48), codec="libx264", times=None, pictures=None, hd=False, tagged=False, **options
):
    """Write `count` grey frames at a constant rate, or with the timestamps `times` in milliseconds.

    `pictures` replaces the grey frames. `hd` encodes colours with BT.709 instead of BT.601. `tagged` records the
    colour space in the file.
    """
    height, width = size
    pictures = [np.full((height, width, 3), level(i), np.uint8) for i in range(count)] if pictures is None else pictures
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        coding = BT709 if hd else BT601
        stream.codec_context.colorspace = coding if tagged else UNSPECIFIED
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709 if hd else Colorspace.ITU601)
            frame.colorspace = coding if tagged else UNSPECIFIED
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


ONE = 1 << 16
MATRICES = {90: (0, ONE, 0, -ONE, 0), 180: (-ONE, 0, 0, 0, -ONE), 270: (0, -ONE, 0, ONE, 0)}


def turn_clip(path, degrees):
    """Write a display matrix to an MP4 file, so that players rotate the video clockwise."""
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # version, times and ids, reserved, layer and volume
    assert struct.unpack(">i", content[start : start + 4]) == (ONE,)
    content[start : start + 20] = struct.pack(">5i", *MATRICES[degrees])
    path.write_bytes(content)
    return path
