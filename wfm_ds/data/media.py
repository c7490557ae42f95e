"""Decoding of images and videos to training pixels."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from wfm_ds.data.episode import CameraSpan, EpisodeVideo, compose_views, picture_size, resize_view, view_places
from wfm_ds.data.frame_conversion import FrameFitter, frame_to_rgb
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
from wfm_ds.data.sound import load_sound, no_sound_error
from wfm_ds.types import SoundClip


def load_pixels(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode an image to uint8 RGB [H,W,3], or a clip of a video to [framing.num_frames,H,W,3].

    Raises BadMedia if the file is unusable, or if it is an image and framing.num_frames exceeds 1.
    """
    if media.suffix not in IMAGE_SUFFIXES:
        return load_clip(media, framing, draw)
    if framing.num_frames > 1:
        raise BadMedia("too_short", media.name, f"an image, but clips have {framing.num_frames} frames")
    return load_image(media, framing, draw)


def load_media(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8] | SoundClip:
    """Decode an image or a clip as `load_pixels` does. If framing.sound_rate is set, decode the sound of the clip too.

    Raises BadMedia if the file is unusable, or if it has no sound during the clip and framing.sound_rate is set.
    """
    if framing.sound_rate is None:
        return load_pixels(media, framing, draw)
    if media.suffix in IMAGE_SUFFIXES or isinstance(media, EpisodeVideo):
        load_pixels(media, framing, draw)  # raises for other defects
        raise no_sound_error(media)
    assert framing.fps is not None  # checked by build_buckets
    with open_video(media) as container:
        frames, start = read_clip(media, container, framing, draw)
        sound = load_sound(media, container, start, framing.num_frames / framing.fps, framing.sound_rate)
    return SoundClip(frames, sound)


def media_size(media: Media) -> tuple[int, int]:
    """Return (height, width) of an image or video after the rotation that the file specifies. Raises BadMedia."""
    return image_size(media) if media.suffix in IMAGE_SUFFIXES else video_size(media)


# Without a whitelist FFmpeg would also read playlists and open the files and addresses in them.
OPEN_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"}
RETRY_S = 10.0  # seek to this time before a clip of an episode if a frame is missing; files may be very long


def load_clip(media: Media, framing: Framing, draw: Draw, frames: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
    """Decode a clip to uint8 RGB [num_frames, height, width, 3]. Each frame is resized and cropped as in load_image.

    frames: ascending indices of the frames (default: choose_frames). Raises BadMedia if the video is
    unusable.
    """
    if isinstance(media, EpisodeVideo):
        chosen = choose_frames(media, media.seconds, framing, draw) if frames is None else frames
        return load_episode(media, chosen[: framing.num_frames], framing, framing.crop_position(draw))
    with open_video(media) as container:
        clip, _ = read_clip(media, container, framing, draw, frames)
    return clip


def read_clip(
    media: Media, container: InputContainer, framing: Framing, draw: Draw, frames: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.uint8], float]:
    """Decode a clip of an opened video. Return (pixels as from load_clip, time of the first frame in seconds)."""
    stream = container.streams.video[0]
    times, starts = read_timestamps(container, stream)
    seconds = np.array(times) * float(stream.time_base or 1)
    chosen = choose_frames(media, seconds, framing, draw) if frames is None else frames
    wanted = [times[i] for i in chosen][: framing.num_frames]
    start = starts[max(0, bisect.bisect_right(starts, wanted[0]) - 1)] if starts else times[0]
    clip = np.empty((len(wanted), framing.height, framing.width, 3), np.uint8)  # stacking frames later would be slower
    fitter = FrameFitter(media, framing, framing.crop_position(draw))
    for places, frame in read_frames(media, container, wanted, (start, times[0])):
        clip[places] = fitter.fit_frame(frame)
    return clip, float(seconds[chosen[0]])


def load_episode(
    media: EpisodeVideo, chosen: Sequence[int], framing: Framing, position: tuple[float, float]
) -> npt.NDArray[np.uint8]:
    """Decode the frames of an episode with the indices `chosen` to uint8 RGB [len(chosen), height, width, 3].

    If the episode has several cameras, their frames are composed before the result is resized and cropped at
    `position`. Raises BadMedia if a video is unusable.
    """
    (first, *others), rows = list(itertools.chain(*media.views)), [len(row) for row in media.views]
    clip = np.empty((len(chosen), framing.height, framing.width, 3), np.uint8)
    if not others:
        fitter = FrameFitter(media, framing, position, untagged_hd=False)

        def store(places: Sequence[int], frame: VideoFrame) -> None:
            clip[places] = fitter.fit_frame(frame)

        read_camera(media, first, chosen, store)
        return clip
    cameras = [read_images(media, first, chosen)]
    _, *places = itertools.chain(*view_places(rows, (cameras[0][0].height, cameras[0][0].width)))
    for camera, (_, _, width, height) in zip(others, places, strict=True):
        cameras.append(read_images(media, camera, chosen, (width, height)))
    for i, views in enumerate(zip(*cameras, strict=True)):
        rgb = compose_views(rows, views)
        check_size(media, framing, rgb.height, rgb.width)
        clip[i] = np.asarray(crop_to_cover(rgb, framing, position))
    return clip


def read_images(
    media: EpisodeVideo, camera: CameraSpan, chosen: Sequence[int], size: tuple[int, int] | None = None
) -> list[Image.Image]:
    """Return the RGB image of one camera for each frame index in `chosen`. size: (width, height) to resize it to.

    Raises BadMedia if a frame cannot be decoded.
    """
    images: dict[int, Image.Image] = {}

    def store(places: Sequence[int], frame: VideoFrame) -> None:
        rgb = frame_to_rgb(frame, untagged_hd=False)
        images.update(dict.fromkeys(places, rgb if size is None else resize_view(rgb, size)))

    read_camera(media, camera, chosen, store)
    return [images[i] for i in range(len(chosen))]


def read_camera(
    media: EpisodeVideo, camera: CameraSpan, chosen: Sequence[int], store: Callable[[Sequence[int], VideoFrame], None]
) -> None:
    """Call store(places, frame) of one camera for the frames nearest to the frame indices `chosen[place]`.

    If a nearer frame follows, `store` is called again for the same place. Raises BadMedia if the file cannot be decoded
    or has no frame within half a frame duration of a requested time.
    """
    try:
        with open_video(camera.media) as container:
            stream = container.streams.video[0]
            unit, origin = float(stream.time_base or 1), stream.start_time or 0
            wanted = [origin + round((camera.start + (media.first + i) / media.fps) / unit) for i in chosen]
            tolerance = int(0.5 / media.fps / unit)
            starts = (wanted[0] - tolerance, max(origin, wanted[0] - round(RETRY_S / unit)))
            for places, frame in read_frames(camera.media, container, wanted, starts, tolerance):
                store(places, frame)
    except BadMedia as error:
        if error.name == media.name:  # from `store`
            raise
        raise BadMedia(error.reason, media.name, f"{error.name}: {error.detail}") from error


def clip_frames(media: Media, framing: Framing, draw: Draw) -> tuple[list[int], int]:
    """Return (frame indices of the clip, number of frames in the video) without decoding frames. Raises BadMedia."""
    seconds = frame_seconds(media)
    return list(choose_frames(media, seconds, framing, draw)), len(seconds)


def frame_seconds(media: Media) -> npt.NDArray[np.float64]:
    """Return the time of each frame of a video in seconds, without decoding frames. Raises BadMedia."""
    if isinstance(media, EpisodeVideo):
        return media.seconds
    with open_video(media) as container:
        stream = container.streams.video[0]
        times, _ = read_timestamps(container, stream)
        return np.array(times) * float(stream.time_base or 1)


def video_size(media: Media) -> tuple[int, int]:
    """Return the shown size (height, width) of a video, rotated as its file says. Decodes a frame. Raises BadMedia."""
    if isinstance(media, EpisodeVideo):
        (first,) = read_images(media, media.views[0][0], [0])
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
    """Return (times of all frames, times to seek to), both ascending, in units of the time base, without decoding."""
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
    media: Media, container: InputContainer, wanted: Sequence[int], starts: Sequence[int], tolerance: int = 0
) -> Iterator[tuple[list[int], VideoFrame]]:
    """Decode the frame nearest to each time in `wanted`. Yields (indices in `wanted`, frame).

    If a nearer frame follows, an index is yielded again. All times are in units of the stream's time base. starts:
    times to seek to before decoding. Each start after the first is used only if frames are still missing. Raises
    BadMedia if no frame is within `tolerance` of a wanted time, or if a frame exceeds Pillow's size limit.
    """
    distances: dict[int, int] = {}
    stream = container.streams.video[0]
    for start in starts:
        missing = {place: time for place, time in enumerate(wanted) if place not in distances}
        last = max(missing.values(), default=start) + tolerance
        container.seek(start, stream=stream)
        for frame in container.decode(stream):
            if (frame_time := frame.pts) is None:
                continue
            near = {place: abs(time - frame_time) for place, time in missing.items()}
            near = {p: d for p, d in near.items() if d <= min(tolerance, distances.get(p, tolerance + 1) - 1)}
            if near:
                if frame.width * frame.height > (Image.MAX_IMAGE_PIXELS or np.inf):
                    size = f"{frame.height} x {frame.width}"
                    raise BadMedia("decode", media.name, f"frames of {size} pixels exceed the size limit")
                distances |= near
                yield list(near), frame
            if frame_time >= last:
                break
        if len(distances) == len(wanted):
            return
    num_missing = len({time for place, time in enumerate(wanted) if place not in distances})
    raise BadMedia("decode", media.name, f"{num_missing} of {len(set(wanted))} frames cannot be decoded")
