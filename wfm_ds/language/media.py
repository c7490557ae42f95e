"""Images and videos as a model's image processor takes them: their sizes from headers, and their patches.

A video is the image processor's patches of its frames, two frames side by side in time: so one resize serves both, and
its size follows from the header too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from wfm_ds.data.pixels import FORMATS, BadMedia, decoding, image_size
from wfm_ds.data.pixels import to_rgb as image_to_rgb
from wfm_ds.data.samples import Media, file_at
from wfm_ds.data.video import decode, opened, timestamps, to_rgb, video_size
from wfm_ds.language.annotations import Kind, Medium
from wfm_ds.recipe.data import DataRecipe

MIN_FRAMES = 2


@dataclass(frozen=True, slots=True)
class Sized:
    """Facts about a medium that its tokens depend on."""

    kind: Kind
    num_tokens: int  # of an image, or of the frames of a video that are one token in time
    seconds: tuple[float, ...] = ()  # of a video: the middle of each such time
    seconds_per_time: float = 0.0  # of a video

    @property
    def num_times(self) -> int:
        return len(self.seconds) or 1


@dataclass(frozen=True, slots=True)
class Pixels:
    """The patches of a medium."""

    patches: npt.NDArray[np.float32]  # [patches, channels * frames * height * width of a patch]
    grid: tuple[int, int, int]  # patches in time, down, across


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames that are taken of a video: indices, ascending, and their times in seconds."""

    indices: list[int]
    seconds: list[float]


class MediaReader:
    """Reads media at the sizes that a recipe asks for. Raises BadMedia for what cannot be used."""

    def __init__(self, image_processor: Any, data: DataRecipe) -> None:
        """image_processor: of the Qwen kind, with patches, merges and sizes by area."""
        self.processor, self._pixels, self._video = image_processor, data.pixels, data.video
        self.merge, self.times = int(image_processor.merge_size), int(image_processor.temporal_patch_size)
        self.patch = int(image_processor.patch_size)
        total = data.video.total_pixels
        self._total = int(0.9 * data.max_tokens * (self.patch * self.merge) ** 2) if total == "auto" else total

    def sized(self, medium: Medium) -> Sized:
        """Return what is known of a medium without its pixels."""
        file = file_at(medium.address)
        if medium.kind == "image":
            return Sized("image", self._tokens(file, *image_size(file), self._pixels.max))
        frames = self._frames(file)
        tokens = self._tokens(file, *video_size(file), self._frame_pixels(len(frames.indices)))
        pairs = np.array(frames.seconds).reshape(-1, self.times)
        middles = tuple(float(pair[[0, -1]].mean()) for pair in pairs)
        span = frames.seconds[-1] - frames.seconds[0]
        apart = span / (len(frames.seconds) - 1) if span else 1 / self._video.fps
        return Sized("video", tokens, middles, self.times * apart)

    def read(self, medium: Medium) -> Pixels:
        """The patches of a medium."""
        file = file_at(medium.address)
        if medium.kind == "image":
            with decoding(file), file.open() as opened_file, Image.open(opened_file, formats=FORMATS) as image:
                return self._patches(file, [image_to_rgb(ImageOps.exif_transpose(image))], self._pixels.max)
        chosen = self._frames(file)
        return self._patches(file, self._decoded(file, chosen), self._frame_pixels(len(chosen.indices)))

    def blank(self, kind: Kind) -> Pixels:
        """The smallest medium there is: one token."""
        size = 3 * self.times * self.patch**2
        return Pixels(np.zeros((self.merge**2, size), np.float32), (1, self.merge, self.merge))

    def _size(self, most: int) -> dict[str, int]:
        return {"shortest_edge": min(self._pixels.min, most), "longest_edge": most}

    def _frame_pixels(self, num_frames: int) -> int:
        return max((self.patch * self.merge) ** 2, min(self._pixels.max, self._total // num_frames))

    def _tokens(self, file: Media, height: int, width: int, most: int) -> int:
        size = self._size(most)
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            return int(self.processor.get_number_of_image_patches(height, width, limits)) // self.merge**2
        except ValueError as error:  # sides out of all proportion
            raise BadMedia("decode", file.name, str(error)) from error

    def _patches(self, file: Media, pictures: Sequence[Image.Image], most: int) -> Pixels:
        try:
            found = self.processor(images=list(pictures), size=self._size(most), return_tensors="np")
        except ValueError as error:
            raise BadMedia("decode", file.name, str(error)) from error
        patches, (_, height, width) = found["pixel_values"], map(int, found["image_grid_thw"][0])
        if len(pictures) == 1:
            return Pixels(np.asarray(patches, np.float32), (1, height, width))
        num_times = len(pictures) // self.times
        # A picture is repeated in the time of its patches: the first of each is what a video's patches are made of.
        first = patches.reshape(len(pictures), height * width, -1, self.times, self.patch**2)[:, :, :, 0]
        pairs = first.reshape(num_times, self.times, height * width, -1, self.patch**2).transpose(0, 2, 3, 1, 4)
        return Pixels(
            np.ascontiguousarray(pairs, np.float32).reshape(num_times * height * width, -1), (num_times, height, width)
        )

    def _frames(self, file: Media) -> Frames:
        with opened(file) as container:
            stream = container.streams.video[0]
            times, _ = timestamps(container, stream)
            if not times:
                raise BadMedia("decode", file.name, "no frame can be decoded")
            seconds = (np.array(times) - times[0]) * float(stream.time_base or 1)
        length = float(seconds[-1]) * len(times) / max(1, len(times) - 1)  # the last frame is shown, too
        wanted = min(max(int(length * self._video.fps), MIN_FRAMES), self._video.max_frames, len(times))
        count = max(self.times, wanted - wanted % self.times)
        indices = np.linspace(0, len(times) - 1, count).round().astype(int)
        return Frames(indices.tolist(), seconds[indices].tolist())

    def _decoded(self, file: Media, chosen: Frames) -> list[Image.Image]:
        with opened(file) as container:
            stream = container.streams.video[0]
            times, _ = timestamps(container, stream)
            wanted = [times[i] for i in chosen.indices]
            found = {time: to_rgb(file, frame) for time, frame in decode(container, stream, times[0], set(wanted))}
        if missing := set(wanted) - found.keys():
            raise BadMedia("decode", file.name, f"{len(missing)} of {len(wanted)} frames cannot be decoded")
        return [found[time] for time in wanted]
