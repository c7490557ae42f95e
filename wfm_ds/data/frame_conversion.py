"""Conversion of decoded video frames to RGB, in their own size or in the size of a framing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from av.filter import Graph
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace
from PIL import Image

from wfm_ds.data.pixels import Framing, check_size, crop_box, crop_to_cover
from wfm_ds.data.samples import Media

BT709, UNSPECIFIED = 1, 2  # ITU-T H.273, matrix coefficients
BT601 = (5, 6)
HD_HEIGHT = 720  # without a colour tag, videos of at least this height are BT.709, smaller ones BT.601
# Formats that swscale resizes. Others, such as 10-bit formats and formats with alpha, are resized by Pillow.
SWSCALE_FORMATS = {"yuv420p", "yuv422p", "yuv444p", "yuvj420p", "yuvj422p", "yuvj444p"}
# The same kernel as Pillow's BICUBIC: a = -0.5, wider when the image is reduced. swscale's default is a = -0.6.
BICUBIC = "flags=bicubic:param0=0:param1=0.5"
EXACT = 1e-6  # crop edges closer than this to an even pixel are even: rounding errors of the crop box are smaller


def frame_to_rgb(frame: VideoFrame, *, untagged_hd: bool = True) -> Image.Image:
    """Convert a frame to an upright RGB image.

    untagged_hd: whether videos without a colour tag are BT.709 if their height is at least HD_HEIGHT. False: they are
    BT.601 at any height, as lerobot writes them.
    """
    is_hd = is_untagged_hd(frame, untagged_hd=untagged_hd)
    # With several threads, swscale starts them for each frame, which takes longer than the conversion.
    pixels = frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709 if is_hd else None, threads=1)
    return Image.fromarray(np.rot90(pixels, frame.rotation // 90))


def is_untagged_hd(frame: VideoFrame, *, untagged_hd: bool) -> bool:
    """Return whether a frame without a colour tag is BT.709. untagged_hd: see `frame_to_rgb`."""
    return untagged_hd and frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT


class FrameFitter:
    """Converts frames to RGB and resizes and crops them to the size of a framing. One object converts one clip."""

    def __init__(
        self, media: Media, framing: Framing, position: tuple[float, float], *, untagged_hd: bool = True
    ) -> None:
        """media: named in errors. position: see `Framing.crop_position`. untagged_hd: see `frame_to_rgb`."""
        self.media, self.framing, self.position, self.untagged_hd = media, framing, position, untagged_hd
        self._graph, self._settings = Graph(), ""

    def fit_frame(self, frame: VideoFrame) -> npt.NDArray[np.uint8]:
        """Return a frame as uint8 RGB [framing.height, framing.width, 3]. Raises BadMedia with reason `too_small`."""
        turns = frame.rotation // 90 % 4
        size = (frame.height, frame.width) if turns % 2 == 0 else (frame.width, frame.height)
        check_size(self.media, self.framing, *size)
        box = self._swscale_box(frame, size)
        if box is None:
            rgb = frame_to_rgb(frame, untagged_hd=self.untagged_hd)
            return np.array(crop_to_cover(rgb, self.framing, self.position))
        return np.rot90(self._scale_frame(frame, rotate_box(box, size, turns), turns), turns)

    def _swscale_box(self, frame: VideoFrame, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
        """Return the (left, top, right, bottom) of the crop in upright pixels, or None if Pillow must resize the frame.

        swscale crops at whole pixels of the subsampled chroma, which are the even pixels.
        """
        if self.framing.video_resize != "swscale" or frame.format.name not in SWSCALE_FORMATS:
            return None
        if frame.colorspace not in (BT709, UNSPECIFIED, *BT601):
            return None
        edges = crop_box(size, self.framing, self.position)
        left, top, right, bottom = even = tuple(2 * round(edge / 2) for edge in edges)
        if max(abs(a - b) for a, b in zip(edges, even, strict=True)) > EXACT:
            return None
        is_unscaled = (bottom - top, right - left) == (self.framing.height, self.framing.width)
        return None if is_unscaled else (left, top, right, bottom)

    def _scale_frame(self, frame: VideoFrame, box: tuple[int, int, int, int], turns: int) -> npt.NDArray[np.uint8]:
        """Return the part of a frame in `box` (left, top, right, bottom), resized, as RGB that is not yet upright."""
        left, top, right, bottom = box
        height, width = self.framing.height, self.framing.width
        if turns % 2:
            height, width = width, height
        is_hd = frame.colorspace == BT709 or is_untagged_hd(frame, untagged_hd=self.untagged_hd)
        filters = (
            f"buffer=video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
            f":colorspace={frame.colorspace}:range={frame.color_range}",
            f"crop={right - left}:{bottom - top}:{left}:{top}",
            f"scale={width}:{height}:in_color_matrix={'bt709' if is_hd else 'bt601'}:{BICUBIC}",
            "format=gbrp",  # planar: swscale rounds exactly, and is faster than to rgb24
            "scale",
            "format=rgb24",
            "buffersink",
        )
        if self._settings != ",".join(filters):  # the first frame, or the size or the colours change inside the video
            self._graph, self._settings = Graph(), ",".join(filters)
            self._graph.threads = 1
            self._graph.link_nodes(*(self._graph.add(*text.split("=", 1)) for text in filters)).configure()
        self._graph.vpush(frame)
        return np.asarray(self._graph.vpull().to_ndarray(), np.uint8)


def rotate_box(box: tuple[int, int, int, int], size: tuple[int, int], turns: int) -> tuple[int, int, int, int]:
    """Return the box of an upright image in the frame that `turns` counterclockwise quarter turns make upright.

    box: (left, top, right, bottom). size: (height, width) of the upright image.
    """
    left, top, right, bottom = box
    height, width = size
    for _ in range(turns):
        left, top, right, bottom = height - bottom, left, height - top, right
        height, width = width, height
    return left, top, right, bottom
