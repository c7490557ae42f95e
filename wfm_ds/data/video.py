"""A clip of a video file: which frames it has, and their pixels. Decoded by FFmpeg through PyAV."""

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

from wfm_ds.data.pixels import DECODE_ERRORS, BadMedia, Draw, Framing, check_size, cover, decoding
from wfm_ds.data.samples import Media

# FFmpeg knows playlists, too, and would open the files and addresses that one names.
OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"}
UNSPECIFIED = 2  # ITU-T H.273, matrix coefficients
HD_HEIGHT = 720  # from here on a video that does not say so has the colours of BT.709, below those of BT.601


def load_clip(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode a clip to uint8 [num_frames, height, width, 3], RGB, scaled and cropped as load_image does, all frames
    alike.

    Raises BadMedia: `decode`, `too_small`, and as choose_frames does.
    """
    with opened(media) as container:
        stream = container.streams.video[0]
        times, keys = timestamps(container, stream)
        seconds = np.array(times) * float(stream.time_base or 1)
        wanted = [times[i] for i in choose_frames(media, seconds, framing, draw)][: framing.num_frames]
        start = keys[max(0, bisect.bisect_right(keys, wanted[0]) - 1)] if keys else times[0]
        place, pictures = framing.place(draw), dict[int, npt.NDArray[np.uint8]]()
        for begin in (start, times[0]):  # some files are cut where no decoder can begin
            if missing := set(wanted) - pictures.keys():
                for time, frame in decode(container, stream, begin, missing):
                    rgb = to_rgb(media, frame)
                    check_size(media, framing, rgb.height, rgb.width)
                    pictures[time] = np.array(cover(rgb, framing, place))
        if missing := set(wanted) - pictures.keys():
            raise BadMedia("decode", media.name, f"{len(missing)} of {len(set(wanted))} frames cannot be decoded")
    return np.stack([pictures[time] for time in wanted])


def clip_frames(media: Media, framing: Framing, draw: Draw) -> tuple[list[int], int]:
    """Return the indices of the frames that a clip's trajectory has, framing.span of them or those of load_clip, and
    how many frames the file has. Decodes nothing. Raises BadMedia as choose_frames does."""
    with opened(media) as container:
        stream = container.streams.video[0]
        times, _ = timestamps(container, stream)
    seconds = np.array(times) * float(stream.time_base or 1)
    return list(choose_frames(media, seconds, framing, draw)), len(times)


def video_size(media: Media) -> tuple[int, int]:
    """Return height and width of a video as load_clip sees it, upright. Decodes its first frame. Raises BadMedia."""
    with opened(media) as container:
        frame = next(container.decode(container.streams.video[0]), None)
        if frame is None:
            raise BadMedia("decode", media.name, "no frame can be decoded")
        turned = frame.rotation // 90 % 2
        return (frame.width, frame.height) if turned else (frame.height, frame.width)


@contextlib.contextmanager
def opened(media: Media) -> Iterator[InputContainer]:
    """Open a file with a video in it, decoded by this thread alone: the workers decode side by side."""
    with (
        decoding(media, (*DECODE_ERRORS, av.FFmpegError)),
        media.open() as file,
        av.open(file, "r", options=OPTIONS, metadata_errors="ignore") as container,
    ):
        container.streams.video[0].thread_count = 1
        yield container


def timestamps(container: InputContainer, stream: VideoStream) -> tuple[list[int], list[int]]:
    """Return the times of all frames, and of those at which decoding can begin, ascending, in the stream's time base.

    Reads the packets without decoding them.
    """
    shown = {p.pts: p.is_keyframe for p in container.demux(stream) if p.pts is not None and not p.is_discard}
    return sorted(shown), sorted(time for time, is_key in shown.items() if is_key)


def choose_frames(media: Media, seconds: npt.NDArray[np.float64], framing: Framing, draw: Draw) -> Sequence[int]:
    """Return indices of the clip's frames among those shown at `seconds` [N], ascending.

    Without fps, num_frames (framing.span, if that is set) successive ones. With it the clip spans (num_frames - 1) /
    fps seconds: it begins with the frame nearest to a drawn moment that leaves room for it, and goes on with the frames
    nearest to 1 / fps, 2 / fps, .. later. Raises BadMedia: `too_short` (nothing is padded or looped), `low_fps` where
    the same frame would be shown twice, unless repeats are allowed.
    """
    count, total = framing.span or framing.num_frames, len(seconds)
    u = draw("clip") if framing.clip == "random" else 0.5
    if framing.fps is None or count == 1:
        if total < count:
            raise BadMedia("too_short", media.name, f"{total} frames, a clip has {count}")
        first = int(u * (total - count + 1))
        return range(first, first + count)
    span, length = (count - 1) / framing.fps, float(seconds[-1] - seconds[0]) if total else 0.0
    room = length - span
    if total < 2 or room < -length / (total - 1) / 2:
        raise BadMedia("too_short", media.name, f"{length:.2f} s, a clip has {span:.2f} s ({count} frames)")
    first = nearest(seconds, seconds[0] + u * max(0.0, room))
    chosen = [nearest(seconds, seconds[first] + i / framing.fps) for i in range(count)]
    if len(set(chosen)) < count and not framing.allow_repeats:
        raise BadMedia(
            "low_fps",
            media.name,
            f"{(total - 1) / length:.2f} frames a second do not give a clip of {framing.fps:g} without repeated ones",
        )
    return chosen


def nearest(seconds: npt.NDArray[np.float64], moment: float) -> int:
    """Return the index of the frame shown nearest to this moment, the earlier of two."""
    after = min(int(np.searchsorted(seconds, moment)), len(seconds) - 1)
    before = max(0, after - 1)
    return before if moment - seconds[before] <= seconds[after] - moment else after


def decode(
    container: InputContainer, stream: VideoStream, begin: int, wanted: Set[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield the frames shown at these times, with them, as far as decoding from `begin` finds them."""
    container.seek(begin, stream=stream)
    last = max(wanted)
    for frame in container.decode(stream):
        if frame.pts is None:
            continue
        if frame.pts in wanted:
            yield frame.pts, frame
        if frame.pts >= last:
            return


def to_rgb(media: Media, frame: VideoFrame) -> Image.Image:
    """Return the frame upright, in RGB."""
    if frame.width * frame.height > (Image.MAX_IMAGE_PIXELS or np.inf):
        raise BadMedia("decode", media.name, f"frames of {frame.height} x {frame.width} pixels are beyond the limit")
    unspecified = frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT
    pixels = frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709 if unspecified else None)
    return Image.fromarray(np.rot90(pixels, frame.rotation // 90))
