"""Decoding of images and videos to training pixels."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace
from av.video.stream import VideoStream
from PIL import Image

from wfm_ds.data.episode import CameraSpan, EpisodeVideo, compose_views, picture_size, resize_view, view_places
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

Pixels = TypeVar("Pixels", bound="Image.Image | npt.NDArray[np.uint8]")


def load_media(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode an image to uint8 RGB [H,W,3], or a clip of a video to [framing.num_frames,H,W,3].

    Raises BadMedia if the file is unusable, or if it is an image and framing.num_frames exceeds 1.
    """
    if media.suffix not in IMAGE_SUFFIXES:
        return load_clip(media, framing, draw)
    if framing.num_frames > 1:
        raise BadMedia("too_short", media.name, f"an image, but clips have {framing.num_frames} frames")
    return load_image(media, framing, draw)


def media_size(media: Media) -> tuple[int, int]:
    """Return (height, width) of an image or video after the rotation that the file specifies.

    Raises BadMedia if the file is unusable.
    """
    return image_size(media) if media.suffix in IMAGE_SUFFIXES else video_size(media)


# Without a whitelist FFmpeg would also read playlists and open the files and addresses in them.
OPEN_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"}
UNSPECIFIED = 2  # ITU-T H.273, matrix coefficients
RETRY_S = 10.0  # seek to this time before a clip of an episode if a frame is missing; files may be very long
HD_HEIGHT = 720  # without a colour tag, videos of at least this height are BT.709, smaller ones BT.601


def load_clip(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode a clip to uint8 RGB [num_frames, height, width, 3]. Each frame is resized and cropped as in load_image.

    Raises BadMedia if the video is unusable.
    """
    position = framing.crop_position(draw)

    def fit(rgb: Image.Image) -> npt.NDArray[np.uint8]:
        check_size(media, framing, rgb.height, rgb.width)
        return np.array(crop_to_cover(rgb, framing, position))

    if isinstance(media, EpisodeVideo):
        chosen = choose_frames(media, media.seconds, framing, draw)[: framing.num_frames]
        return np.stack(decode_episode(media, chosen, fit))
    with open_video(media) as container:
        stream = container.streams.video[0]
        times, starts = read_timestamps(container, stream)
        seconds = np.array(times) * float(stream.time_base or 1)
        wanted = [times[i] for i in choose_frames(media, seconds, framing, draw)][: framing.num_frames]
        start = starts[max(0, bisect.bisect_right(starts, wanted[0]) - 1)] if starts else times[0]
        frames = read_frames(media, container, wanted, (start, times[0]), fit)
    return np.stack([frames[time] for time in wanted])


def decode_episode(
    media: EpisodeVideo, chosen: Sequence[int], convert: Callable[[Image.Image], Pixels]
) -> list[Pixels]:
    """Return convert(image) for each frame index of an episode in `chosen`.

    If the episode has several cameras, each image is composed of their frames. Raises BadMedia if a video is unusable.
    """
    (first, *others), rows = list(itertools.chain(*media.views)), [len(row) for row in media.views]
    if not others:
        return read_camera(media, first, chosen, convert)
    cameras = [read_camera(media, first, chosen, lambda rgb: rgb)]
    _, *places = itertools.chain(*view_places(rows, (cameras[0][0].height, cameras[0][0].width)))
    for camera, (_, _, width, height) in zip(others, places, strict=True):
        resize = functools.partial(resize_view, size=(width, height))
        cameras.append(read_camera(media, camera, chosen, resize))
    return [convert(compose_views(rows, views)) for views in zip(*cameras, strict=True)]


def read_camera(
    media: EpisodeVideo, camera: CameraSpan, chosen: Sequence[int], convert: Callable[[Image.Image], Pixels]
) -> list[Pixels]:
    """Return convert(image) of one camera for each frame index in `chosen`.

    Raises BadMedia if the file cannot be decoded or has no frame within half a frame duration of a requested time.
    """
    try:
        with open_video(camera.media) as container:
            stream = container.streams.video[0]
            unit, origin = float(stream.time_base or 1), stream.start_time or 0
            wanted = [origin + round((camera.start + (media.first + i) / media.fps) / unit) for i in chosen]
            tolerance = int(0.5 / media.fps / unit)
            starts = (wanted[0] - tolerance, max(origin, wanted[0] - round(RETRY_S / unit)))
            frames = read_frames(camera.media, container, wanted, starts, convert, tolerance, untagged_hd=False)
    except BadMedia as error:
        if error.name == media.name:  # from `convert`
            raise
        raise BadMedia(error.reason, media.name, f"{error.name}: {error.detail}") from error
    return [frames[time] for time in wanted]


def clip_frames(media: Media, framing: Framing, draw: Draw) -> tuple[list[int], int]:
    """Return (frame indices of the clip, number of frames in the video) without decoding frames.

    Raises BadMedia if the video is unusable.
    """
    if isinstance(media, EpisodeVideo):
        return list(choose_frames(media, media.seconds, framing, draw)), media.length
    with open_video(media) as container:
        stream = container.streams.video[0]
        times, _ = read_timestamps(container, stream)
    seconds = np.array(times) * float(stream.time_base or 1)
    return list(choose_frames(media, seconds, framing, draw)), len(times)


def video_size(media: Media) -> tuple[int, int]:
    """Return (height, width) of a video after the rotation that the file specifies. Decodes the first frame.

    Raises BadMedia if the file is unusable.
    """
    if isinstance(media, EpisodeVideo):
        (first,) = read_camera(media, media.views[0][0], [0], lambda rgb: rgb)
        return picture_size([len(row) for row in media.views], (first.height, first.width))
    with open_video(media) as container:
        frame = next(container.decode(container.streams.video[0]), None)
        if frame is None:
            raise BadMedia("decode", media.name, "no frame can be decoded")
        is_rotated = frame.rotation // 90 % 2
        return (frame.width, frame.height) if is_rotated else (frame.height, frame.width)


def video_duration(media: Media) -> float:
    """Return the length of a video in seconds, from the file header. Raises BadMedia if the file is unusable."""
    with open_video(media) as container:
        stream = container.streams.video[0]
        if stream.duration is None or stream.time_base is None:
            return (container.duration or 0) / av.time_base
        return float(stream.duration * stream.time_base)


@contextlib.contextmanager
def open_video(media: Media) -> Iterator[InputContainer]:
    with (
        convert_decode_errors(media, (*DECODE_ERRORS, av.FFmpegError)),
        media.open() as file,
        av.open(file, "r", options=OPEN_OPTIONS, metadata_errors="ignore") as container,
    ):
        container.streams.video[0].thread_count = 1
        yield container


def read_timestamps(container: InputContainer, stream: VideoStream) -> tuple[list[int], list[int]]:
    """Return (times of all frames, times to seek to), both ascending, in units of the stream's time base.

    No frames are decoded.
    """
    if (times := read_index(container, stream)) is not None:
        return times, times
    is_keyframe = {p.pts: p.is_keyframe for p in container.demux(stream) if p.pts is not None and not p.is_discard}
    return sorted(is_keyframe), sorted(time for time, is_key in is_keyframe.items() if is_key)


def read_index(container: InputContainer, stream: VideoStream) -> list[int] | None:
    """Return the times of all frames from the index of an MP4 or MOV file, ascending, in units of the time base.

    Returns None if the index does not determine the times: for truncated and fragmented files, for files with an edit
    list that hides frames, and for files that have both B-frames and a variable frame rate.
    """
    entries = list(stream.index_entries)
    if "mp4" not in container.format.name or stream.start_time is None or not 0 < stream.frames == len(entries):
        return None
    times = [entry.timestamp for entry in entries]
    is_regular = len({after - before for before, after in itertools.pairwise(times)}) <= 1
    is_complete = all(not entry.is_discard and entry.pos + entry.size <= container.size for entry in entries)
    if not is_complete or (stream.codec_context.has_b_frames and not is_regular):
        return None
    return [time - times[0] + stream.start_time for time in times]


def choose_frames(media: Media, seconds: npt.NDArray[np.float64], framing: Framing, draw: Draw) -> Sequence[int]:
    """Return the ascending frame indices of a clip.

    seconds: [N], times of the video's frames. The number of indices is framing.span, or framing.num_frames if
    framing.span is None. If framing.fps is None, the frames are consecutive. Otherwise, they are the frames nearest to
    times at intervals of 1 / fps seconds.

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
    """Return the index of the frame nearest to the time `moment`, or the earlier index if two are equally near."""
    after = min(int(np.searchsorted(seconds, moment)), len(seconds) - 1)
    before = max(0, after - 1)
    return before if moment - seconds[before] <= seconds[after] - moment else after


def read_frames(
    media: Media,
    container: InputContainer,
    wanted: Sequence[int],
    starts: Sequence[int],
    convert: Callable[[Image.Image], Pixels],
    tolerance: int = 0,
    *,
    untagged_hd: bool = True,
) -> dict[int, Pixels]:
    """Decode the frame nearest to each time in `wanted` and return {time: convert(upright RGB image)}.

    All times are in units of the stream's time base. starts: times to seek to before decoding. Each start after the
    first is used only if frames are still missing. untagged_hd: see `frame_to_rgb`. Raises BadMedia if no frame is
    within `tolerance` of a wanted time.
    """
    frames, distances = dict[int, Pixels](), dict[int, int]()
    for start in starts:
        missing = set(wanted) - frames.keys()
        for frame_time, frame in decode_frames(container, start, max(missing, default=start) + tolerance):
            near = {time: abs(time - frame_time) for time in missing}
            near = {time: d for time, d in near.items() if d <= min(tolerance, distances.get(time, tolerance + 1) - 1)}
            if near:
                frames |= dict.fromkeys(near, convert(frame_to_rgb(media, frame, untagged_hd=untagged_hd)))
                distances |= near
        if len(frames) == len(set(wanted)):
            return frames
    num_missing = len(set(wanted) - frames.keys())
    raise BadMedia("decode", media.name, f"{num_missing} of {len(set(wanted))} frames cannot be decoded")


def decode_frames(container: InputContainer, start: int, last: int) -> Iterator[tuple[int, VideoFrame]]:
    stream = container.streams.video[0]
    container.seek(start, stream=stream)
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        yield frame.pts, frame
        if frame.pts >= last:
            return


def frame_to_rgb(media: Media, frame: VideoFrame, *, untagged_hd: bool = True) -> Image.Image:
    """Convert a frame to an upright RGB image. Raises BadMedia if the frame exceeds Pillow's size limit.

    untagged_hd: whether videos without a colour tag are BT.709 if their height is at least HD_HEIGHT. False: they are
    BT.601 at any height, as lerobot writes them.
    """
    if frame.width * frame.height > (Image.MAX_IMAGE_PIXELS or np.inf):
        raise BadMedia("decode", media.name, f"frames of {frame.height} x {frame.width} pixels exceed the size limit")
    is_hd = untagged_hd and frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT
    pixels = frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709 if is_hd else None)
    return Image.fromarray(np.rot90(pixels, frame.rotation // 90))
