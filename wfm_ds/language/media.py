"""Images and videos for a model's image processor: token counts from file headers, and pixel patches.

Each frame of a video is processed as an image. The patches of successive frames are then joined along the time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from PIL import Image

from wfm_ds.data.frame_conversion import frame_to_rgb
from wfm_ds.data.media import open_video, read_frames, read_timestamps, video_size
from wfm_ds.data.pixels import BadMedia, convert_decode_errors, decode_image, image_size
from wfm_ds.data.samples import Media, media_from_path
from wfm_ds.language.annotations import MediaKind, MediaReference
from wfm_ds.recipe.data import DataRecipe

MIN_FRAMES = 2


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Token count of an image or video and, for a video, its time steps."""

    kind: MediaKind
    num_tokens: int  # per image, or per time step of a video
    seconds: tuple[float, ...] = ()  # videos: the middle of each time step
    seconds_per_time: float = 0.0  # videos: duration of a time step

    @property
    def num_times(self) -> int:
        return len(self.seconds) or 1


@dataclass(frozen=True, slots=True)
class MediaPatches:
    """The pixel patches of an image or video, as input of the vision tower."""

    patches: npt.NDArray[np.float32]  # [patches, channels * frames * height * width of a patch]
    grid: tuple[int, int, int]  # number of patches: time, height, width


class MediaReader:
    """Reads images and videos within the size limits of the recipe. Raises BadMedia for unusable files."""

    def __init__(self, image_processor: Any, data: DataRecipe) -> None:
        self.processor, self._pixels, self._video = image_processor, data.pixels, data.video
        self.merge, self.times = int(image_processor.merge_size), int(image_processor.temporal_patch_size)
        self.patch = int(image_processor.patch_size)
        total = data.video.total_pixels
        self._total = int(0.9 * data.max_tokens * (self.patch * self.merge) ** 2) if total == "auto" else total

    def measure(self, item: MediaReference) -> MediaSize:
        """Return the token count and frame times of an image or video. Decodes at most the first frame."""
        file = media_from_path(item.address)
        if item.kind == "image":
            return MediaSize("image", self._count_tokens(file, *image_size(file), self._pixels.max))
        with open_video(file) as container:
            *_, seconds = self._select_frames(file, container)
        tokens = self._count_tokens(file, *video_size(file), self._frame_pixels(len(seconds)))
        midpoints = tuple(float(pair[[0, -1]].mean()) for pair in np.array(seconds).reshape(-1, self.times))
        span = seconds[-1] - seconds[0]
        frame_interval = span / (len(seconds) - 1) if span else 1 / self._video.fps
        return MediaSize("video", tokens, midpoints, self.times * frame_interval)

    def read(self, item: MediaReference) -> MediaPatches:
        file = media_from_path(item.address)
        if item.kind == "image":
            with convert_decode_errors(file):
                return self._make_patches(file, [decode_image(file)], self._pixels.max)
        frames: dict[int, Image.Image] = {}
        with open_video(file) as container:
            wanted, first, _ = self._select_frames(file, container)
            for places, frame in read_frames(file, container, wanted, (first,)):
                frames |= dict.fromkeys(places, frame_to_rgb(frame))
        images = [frames[i] for i in range(len(wanted))]
        return self._make_patches(file, images, self._frame_pixels(len(wanted)))

    def blank(self, kind: MediaKind) -> MediaPatches:
        """Return the patches of the smallest blank image or video, which is one token in the decoder."""
        size = 3 * self.times * self.patch**2
        return MediaPatches(np.zeros((self.merge**2, size), np.float32), (1, self.merge, self.merge))

    def _frame_pixels(self, num_frames: int) -> int:
        return max((self.patch * self.merge) ** 2, min(self._pixels.max, self._total // num_frames))

    def _count_tokens(self, file: Media, height: int, width: int, most: int) -> int:
        limits = {"min_pixels": min(self._pixels.min, most), "max_pixels": most}
        try:
            return int(self.processor.get_number_of_image_patches(height, width, limits)) // self.merge**2
        except ValueError as error:  # extreme aspect ratio
            raise BadMedia("decode", file.name, str(error)) from error

    def _make_patches(self, file: Media, images: Sequence[Image.Image], most: int) -> MediaPatches:
        size = {"shortest_edge": min(self._pixels.min, most), "longest_edge": most}
        try:
            features = self.processor(images=list(images), size=size, return_tensors="np")
        except ValueError as error:
            raise BadMedia("decode", file.name, str(error)) from error
        patches, (_, height, width) = features["pixel_values"], map(int, features["image_grid_thw"][0])
        if len(images) == 1:
            return MediaPatches(np.asarray(patches, np.float32), (1, height, width))
        num_times = len(images) // self.times
        # The processor repeats an image along the temporal patch axis; keep only the first copy of each frame.
        first = patches.reshape(len(images), height * width, -1, self.times, self.patch**2)[:, :, :, 0]
        pairs = first.reshape(num_times, self.times, height * width, -1, self.patch**2).transpose(0, 2, 3, 1, 4)
        return MediaPatches(
            np.ascontiguousarray(pairs, np.float32).reshape(num_times * height * width, -1), (num_times, height, width)
        )

    def _select_frames(self, file: Media, container: InputContainer) -> tuple[list[int], int, list[float]]:
        """Return (times of the selected frames, time of the first frame, seconds of the selected frames), ascending.

        Times are in units of the stream's time base. Seconds count from the first frame.
        """
        stream = container.streams.video[0]
        times, _ = read_timestamps(container, stream)
        if not times:
            raise BadMedia("decode", file.name, "no frame can be decoded")
        seconds = (np.array(times) - times[0]) * float(stream.time_base or 1)
        length = float(seconds[-1]) * len(times) / max(1, len(times) - 1)  # includes the duration of the last frame
        wanted = min(max(int(length * self._video.fps), MIN_FRAMES), self._video.max_frames, len(times))
        count = max(self.times, wanted - wanted % self.times)
        indices = np.linspace(0, len(times) - 1, count).round().astype(int)
        return [times[i] for i in indices], times[0], seconds[indices].tolist()
