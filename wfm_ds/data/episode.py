"""Videos of recorded episodes, from one or more cameras."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.data.samples import Media, media_from_path


@dataclass(frozen=True, slots=True)
class CameraSpan:
    """The part of a video file that shows one episode."""

    address: str  # path or s3:// address
    start: float  # time of the episode's first frame, in seconds from the start of the file

    @property
    def media(self) -> Media:
        return media_from_path(self.address)


Views: TypeAlias = Sequence[Sequence[CameraSpan]]
"""The cameras in one image: rows from top to bottom, each from left to right."""


@dataclass(frozen=True, slots=True)
class EpisodeVideo:
    """A window of an episode. If there are several cameras, each frame is composed of their images."""

    name: str
    views: Views
    fps: float  # frame rate of the recording
    first: int  # index of the window's first frame in the episode
    length: int  # frames

    @property
    def suffix(self) -> str:
        return ".mp4"

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """Times of the frames in seconds, [length]. The first frame of the window has time 0."""
        return np.arange(self.length) / self.fps

    def open(self) -> BinaryIO:
        return self.views[0][0].media.open()

    def identity(self) -> tuple[str | int, ...]:
        cameras = [(*camera.media.identity(), repr(camera.start)) for row in self.views for camera in row]
        shape = [str(len(row)) for row in self.views]
        return *(part for camera in cameras for part in camera), *shape, repr(self.fps), self.first, self.length


def view_places(rows: Sequence[int], size: tuple[int, int]) -> list[list[tuple[int, int, int, int]]]:
    """Return the place (left, top, width, height) of each camera in the composed image.

    rows: number of cameras in each row. size: (height, width) of the first camera, which keeps its size. All rows have
    the same width. The cameras of a row have equal widths, and their places have the aspect ratio of the first camera.
    """
    height, width = size
    total, top, places = width * rows[0], 0, []
    for count in rows:
        edges = [total * i // count for i in range(count + 1)]
        row_height = round(height * rows[0] / count)
        places.append([(left, top, right - left, row_height) for left, right in itertools.pairwise(edges)])
        top += row_height
    return places


def picture_size(rows: Sequence[int], size: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of the composed image. The arguments are the same as for `view_places`."""
    left, top, width, height = view_places(rows, size)[-1][-1]
    return top + height, left + width


def compose_views(rows: Sequence[int], views: Sequence[Image.Image]) -> Image.Image:
    """Compose the images of several cameras into one image, after resizing them to their places (`view_places`).

    rows: number of cameras in each row.
    """
    size = (views[0].height, views[0].width)
    height, width = picture_size(rows, size)
    composed = Image.new("RGB", (width, height))
    for view, (left, top, _, _) in zip(views, itertools.chain(*view_places(rows, size)), strict=True):
        composed.paste(view, (left, top))
    return composed


def resize_view(view: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to (width, height)."""
    return view if view.size == size else view.resize(size, Image.Resampling.BICUBIC)
