"""Decoding of images and videos to training pixels. Clips of videos are decoded with FFmpeg through PyAV."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence, Set

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace
from av.video.stream import VideoStream
from PIL import Image

from wfm_ds.data.pixels import (
    DECODE_ERRORS,
    BadMedia,
    Draw,
    Framing,
    check_size,
    convert_decode_errors,
    crop_to_cover,
    image_size,
    load_image,
)
from wfm_ds.data.samples import IMAGE_SUFFIXES, Media


def load_media(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode to uint8 RGB: [H,W,3] for an image, [framing.num_frames,H,W,3] for a video.

    Raises BadMedia if the file is unusable, or with the reason `too_short` if it is an image although
    framing.num_frames is larger than 1.
    """
    if media.suffix not in IMAGE_SUFFIXES:
        return load_clip(media, framing, draw)
    if framing.num_frames > 1:
        raise BadMedia("too_short", media.name, f"an image, but clips have {framing.num_frames} frames")
    return load_image(media, framing, draw)


def media_size(media: Media) -> tuple[int, int]:
    """Return height and width of an image or video after upright rotation. Raises BadMedia."""
    return image_size(media) if media.suffix in IMAGE_SUFFIXES else video_size(media)


# Without a whitelist FFmpeg would also read playlists and open the files and addresses in them.
OPEN_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"}
UNSPECIFIED = 2  # ITU-T H.273, matrix coefficients
HD_HEIGHT = 720  # without a colour tag, videos of at least this height are BT.709, smaller ones BT.601


def load_clip(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode a clip to uint8 RGB [num_frames, height, width, 3]. Each frame is resized and cropped as in load_image.

    Raises BadMedia with reason `decode`, `too_small`, or a reason of choose_frames.
    """
    with open_video(media) as container:
        stream = container.streams.video[0]
        times, keys = read_timestamps(container, stream)
        seconds = np.array(times) * float(stream.time_base or 1)
        wanted = [times[i] for i in choose_frames(media, seconds, framing, draw)][: framing.num_frames]
        start = keys[max(0, bisect.bisect_right(keys, wanted[0]) - 1)] if keys else times[0]
        position, frames = framing.crop_position(draw), dict[int, npt.NDArray[np.uint8]]()
        for seek_time in (start, times[0]):  # retry from the start for files with wrong keyframe flags
            if missing := set(wanted) - frames.keys():
                for time, frame in decode_frames(container, stream, seek_time, missing):
                    rgb = frame_to_rgb(media, frame)
                    check_size(media, framing, rgb.height, rgb.width)
                    frames[time] = np.array(crop_to_cover(rgb, framing, position))
        if missing := set(wanted) - frames.keys():
            raise BadMedia("decode", media.name, f"{len(missing)} of {len(set(wanted))} frames cannot be decoded")
    return np.stack([frames[time] for time in wanted])


def clip_frames(media: Media, framing: Framing, draw: Draw) -> tuple[list[int], int]:
    """Return (frame indices of the clip, number of frames in the file). Does not decode frames. Raises BadMedia."""
    with open_video(media) as container:
        stream = container.streams.video[0]
        times, _ = read_timestamps(container, stream)
    seconds = np.array(times) * float(stream.time_base or 1)
    return list(choose_frames(media, seconds, framing, draw)), len(times)


def video_size(media: Media) -> tuple[int, int]:
    """Return height and width of a video after it is rotated upright. Decodes the first frame. Raises BadMedia."""
    with open_video(media) as container:
        frame = next(container.decode(container.streams.video[0]), None)
        if frame is None:
            raise BadMedia("decode", media.name, "no frame can be decoded")
        is_rotated = frame.rotation // 90 % 2
        return (frame.width, frame.height) if is_rotated else (frame.height, frame.width)


@contextlib.contextmanager
def open_video(media: Media) -> Iterator[InputContainer]:
    """Open a video for decoding with a single thread. Worker threads decode several files in parallel.

    Raises BadMedia.
    """
    with (
        convert_decode_errors(media, (*DECODE_ERRORS, av.FFmpegError)),
        media.open() as file,
        av.open(file, "r", options=OPEN_OPTIONS, metadata_errors="ignore") as container,
    ):
        container.streams.video[0].thread_count = 1
        yield container


def read_timestamps(container: InputContainer, stream: VideoStream) -> tuple[list[int], list[int]]:
    """Return (times of all frames, times of the keyframes), both ascending. Does not decode frames.

    The times are in units of the stream's time base.
    """
    is_keyframe = {p.pts: p.is_keyframe for p in container.demux(stream) if p.pts is not None and not p.is_discard}
    return sorted(is_keyframe), sorted(time for time, is_key in is_keyframe.items() if is_key)


def choose_frames(media: Media, seconds: npt.NDArray[np.float64], framing: Framing, draw: Draw) -> Sequence[int]:
    """Return the ascending frame indices of a clip.

    seconds: [N], times of the video's frames. The number of indices is framing.span, or framing.num_frames if
    framing.span is None. If framing.fps is None, the frames are consecutive. Otherwise, one frame is chosen every
    1 / fps seconds, and each is the frame nearest to its time.

    Raises BadMedia with reason `too_short`, or with reason `low_fps` if a frame would be repeated and
    framing.allow_repeats is False.
    """
    count, total = framing.span or framing.num_frames, len(seconds)
    u = draw("clip") if framing.clip == "random" else 0.5
    if framing.fps is None or count == 1:
        if total < count:
            raise BadMedia("too_short", media.name, f"{total} frames, but clips have {count}")
        first = int(u * (total - count + 1))
        return range(first, first + count)
    span, length = (count - 1) / framing.fps, float(seconds[-1] - seconds[0]) if total else 0.0
    slack = length - span
    if total < 2 or slack < -length / (total - 1) / 2:
        raise BadMedia("too_short", media.name, f"{length:.2f} s, but clips have {span:.2f} s ({count} frames)")
    first = nearest_frame(seconds, seconds[0] + u * max(0.0, slack))
    chosen = [nearest_frame(seconds, seconds[first] + i / framing.fps) for i in range(count)]
    if len(set(chosen)) < count and not framing.allow_repeats:
        raise BadMedia(
            "low_fps",
            media.name,
            f"{(total - 1) / length:.2f} fps is too low for clips of {framing.fps:g} fps without repeated frames",
        )
    return chosen


def nearest_frame(seconds: npt.NDArray[np.float64], moment: float) -> int:
    """Return the index of the frame nearest to the time `moment`.

    If two frames are equally near, return the earlier one.
    """
    after = min(int(np.searchsorted(seconds, moment)), len(seconds) - 1)
    before = max(0, after - 1)
    return before if moment - seconds[before] <= seconds[after] - moment else after


def decode_frames(
    container: InputContainer, stream: VideoStream, start: int, wanted: Set[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Seek to the time `start` and decode. Yield (time, frame) for each frame at a time in `wanted`."""
    container.seek(start, stream=stream)
    last = max(wanted)
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        if frame.pts in wanted:
            yield frame.pts, frame
        if frame.pts >= last:
            return


def frame_to_rgb(media: Media, frame: VideoFrame) -> Image.Image:
    """Convert a frame to an upright RGB image. Raises BadMedia if the frame exceeds Pillow's size limit."""
    if frame.width * frame.height > (Image.MAX_IMAGE_PIXELS or np.inf):
        raise BadMedia("decode", media.name, f"frames of {frame.height} x {frame.width} pixels exceed the size limit")
    unspecified = frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT
    pixels = frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709 if unspecified else None)
    return Image.fromarray(np.rot90(pixels, frame.rotation // 90))
