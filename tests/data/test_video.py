"""Video decoding: the chosen frames, their exact decoding, and a named error for every bad file."""

import contextlib
import math

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clips import index_of, turn_clip, write_clip
from each_case import check_each
from wfm_ds.data.frame_conversion import HD_HEIGHT
from wfm_ds.data.media import (
    choose_frames,
    clip_frames,
    load_clip,
    load_media,
    media_size,
    open_video,
    read_index,
    read_timestamps,
)
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.samples import LocalFile

HEIGHT, WIDTH = 32, 48
NOWHERE = LocalFile("nowhere.mp4")


def load(path, draw=draw_centre, **framing):
    return load_clip(LocalFile(path), Framing(**{"height": HEIGHT, "width": WIDTH, **framing}), draw)


def indices(path, u, **framing):
    frames = load(path, lambda purpose: u, **framing)
    assert (frames.dtype, frames.shape[1:]) == (np.uint8, (HEIGHT, WIDTH, 3))
    return [index_of(frame) for frame in frames]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Write a clip of 40 frames at 24 fps with B-frames and a keyframe every 12 frames."""
    return write_clip(tmp_path_factory.mktemp("clip") / "a.mp4", g="12", bf="2")


@check_each(
    ("suffix", "codec"),
    [(".mp4", "libx264"), (".mov", "libx264"), (".mkv", "libx264"), (".avi", "libx264"), (".webm", "libvpx-vp9")],
)
def test_every_container_gives_the_frames_that_are_asked_for(tmp_path, suffix, codec):
    path = write_clip(tmp_path / f"a{suffix}", codec=codec)
    for u, first in ((0.0, 0), (0.5, 18), (0.999, 35)):
        assert indices(path, u, num_frames=5) == list(range(first, first + 5))


@check_each("fps", [None, 24, 12, 8, 5])
def test_decoded_frames_are_the_chosen_ones(clip, fps):
    seconds = np.arange(40) / 24
    for u in np.linspace(0, 0.999, 23):
        framing = Framing(height=HEIGHT, width=WIDTH, num_frames=5, fps=fps)
        assert indices(clip, u, num_frames=5, fps=fps) == list(
            choose_frames(NOWHERE, seconds, framing, lambda purpose, u=u: u)
        )


class CountedFile(LocalFile):
    """A video that counts the bytes read from it."""

    num_bytes = 0

    def open(self):
        file = super().open()
        read = file.read

        class Counted:
            seek, tell, close, __enter__, __exit__ = file.seek, file.tell, file.close, file.__enter__, file.__exit__

            def read(_, size=-1):
                content = read(size)
                CountedFile.num_bytes += len(content)
                return content

        return Counted()


X264, AV1 = {"codec": "libx264", "crf": "25"}, {"codec": "libsvtav1", "preset": "12", "svtav1-params": "lp=1"}
CODINGS = {
    "two, no B-frames": X264 | {"g": "2", "bf": "0"},
    "two": X264 | {"g": "2", "bf": "2"},
    "twelve": X264 | {"g": "12", "bf": "2"},
    "250": X264 | {"g": "250", "bf": "3"},
    "open groups": X264 | {"g": "12", "bf": "2", "x264-params": "open-gop=1"},
    "variable rate": X264 | {"g": "12", "bf": "0"},
    "variable rate, B-frames": X264 | {"g": "12", "bf": "2"},
    "AV1, two": AV1 | {"g": "2"},
    "AV1, 60": AV1 | {"g": "60"},
    "VP9": {"codec": "libvpx-vp9", "g": "30", "cpu-used": "8"},
    "wrong flags": X264 | {"g": "40", "bf": "0"},
    "truncated": X264 | {"g": "12", "bf": "0"},
}
NO_INDEX = {"variable rate, B-frames", "VP9", "truncated"}


@check_each("coding", CODINGS)
def test_a_clip_has_the_pixels_of_a_whole_decode(tmp_path, coding):
    """The pictures are random, so a frame that is decoded without its references differs."""
    draws = np.random.default_rng(0)
    pictures = draws.integers(0, 255, (70, 64, 64, 3), np.uint8)
    times = np.cumsum(draws.integers(20, 60, 70)).tolist() if "variable" in coding else None
    path = tmp_path / ("a.webm" if coding == "VP9" else "a.mp4")
    write_clip(path, pictures=pictures, size=(64, 64), times=times, **CODINGS[coding])
    if coding == "wrong flags":  # without this box, all frames count as keyframes
        path.write_bytes(path.read_bytes().replace(b"stss", b"free"))
    elif coding == "truncated":
        content = move_index_first(path)
        path.write_bytes(content[: len(content) * 2 // 3])
    with open_video(LocalFile(path)) as container:
        assert (read_index(container, container.streams.video[0]) is None) == (coding in NO_INDEX)
        packets = [p for p in container.demux(video=0) if p.pts is not None and not p.is_discard]
    with open_video(LocalFile(path)) as container:
        assert read_timestamps(container, container.streams.video[0])[0] == sorted(p.pts for p in packets)
        whole = list(decode_until_damage(container))
    for first in range(0, len(whole) - 6, 5):
        share = (first + 0.5) / (len(packets) - 4)
        frames = load(path, lambda purpose, share=share: share, num_frames=5, height=64, width=64)
        assert (frames == np.stack(whole[first : first + 5])).all(), first


def decode_until_damage(container):
    with contextlib.suppress(av.FFmpegError):
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def move_index_first(path):
    """Return the file with its index before its frames, so that the index remains if the file is cut short."""
    moved = path.with_name("moved.mp4")
    with av.open(str(path)) as source, av.open(str(moved), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return moved.read_bytes()


def test_a_clip_reads_its_own_part_of_the_file(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 255, (300, 64, 64, 3), np.uint8)
    path = write_clip(tmp_path / "a.mp4", pictures=pictures, size=(64, 64), g="10", bf="2", crf="10")
    CountedFile.num_bytes = 0
    framing = Framing(height=64, width=64, num_frames=5)
    chosen, total = clip_frames(CountedFile(path), framing, draw_centre)
    load_clip(CountedFile(path), framing, draw_centre)
    assert (total, len(chosen)) == (300, 5)
    assert CountedFile.num_bytes < path.stat().st_size / 5


def choose(seconds, u, **framing):
    return list(choose_frames(NOWHERE, np.asarray(seconds), Framing(height=1, width=1, **framing), lambda purpose: u))


@given(st.data())
def test_a_clip_keeps_its_rate_and_stays_inside(data):
    """For sources of at least the requested fps, with timestamps rounded to milliseconds."""
    count, fps = data.draw(st.integers(2, 60)), data.draw(st.floats(2, 30))
    source = fps * data.draw(st.floats(1, 6))
    total = math.ceil((count - 1) / fps * source) + 1 + data.draw(st.integers(0, 300))
    seconds = np.round(np.arange(total) / source + data.draw(st.floats(0, 100)), 3)
    chosen = choose(
        seconds, data.draw(st.floats(0, 1, exclude_max=True)), num_frames=count, fps=fps, allow_repeats=True
    )
    assert len(chosen) == count
    assert 0 <= chosen[0] <= chosen[-1] < total
    wanted = seconds[chosen[0]] + np.arange(count) / fps
    assert np.abs(seconds[chosen] - wanted).max() <= 0.5 / source + 0.002
    if source > 1.1 * fps and source < 200:
        assert len(set(chosen)) == count


@given(count=st.integers(1, 40), extra=st.integers(0, 40), u=st.floats(0, 1, exclude_max=True))
def test_without_a_rate_frames_follow_each_other_and_every_place_is_reached(count, extra, u):
    total = count + extra
    chosen = choose(np.arange(total) / 24, u, num_frames=count)
    assert chosen == list(range(chosen[0], chosen[0] + count))
    assert chosen[0] == int(u * (extra + 1))
    assert choose(np.arange(total) / 24, u, num_frames=count, clip="centre")[0] == (extra + 1) // 2


@check_each(("source", "fps"), [(24, 24), (23.976, 24), (29.97, 30), (30, 16), (25, 16)])
def test_usual_rates_give_93_frames_without_repeats(source, fps):
    seconds = np.round(np.arange(600) / source, 3)
    for u in np.linspace(0, 0.999, 50):
        assert len(set(choose(seconds, u, num_frames=93, fps=fps))) == 93


def test_a_source_slower_than_asked_is_refused_unless_repeats_are_allowed():
    seconds = np.arange(100) / 10
    with pytest.raises(BadMedia, match=r"10\.00 fps is too low for clips of 24 fps") as raised:
        choose(seconds, 0.2, num_frames=20, fps=24)
    assert raised.value.reason == "low_fps"
    chosen = choose(seconds, 0.0, num_frames=20, fps=40, allow_repeats=True)
    assert chosen == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5][: len(chosen)]


def test_at_most_half_a_frame_may_be_missing():
    """17 frames at 8 fps span 2 s; a 24 fps source may be shorter than that by up to 1/48 s."""
    assert choose(np.arange(49) / 24, 0.9, num_frames=17, fps=8)[-1] == 48
    with pytest.raises(BadMedia, match=r"1\.96 s, but clips have 2\.00 s \(17 frames\)") as raised:
        choose(np.arange(48) / 24, 0.9, num_frames=17, fps=8)
    assert raised.value.reason == "too_short"
    with pytest.raises(BadMedia, match="16 frames, but clips have 17"):
        choose(np.arange(16) / 24, 0.9, num_frames=17)
    with pytest.raises(BadMedia, match="0 frames"):
        choose([], 0.0, num_frames=1)


def test_variable_rates_follow_the_clock_and_not_the_count(tmp_path):
    """The source has 10 frames in the first second and 30 in the next; at 8 fps the next second skips more frames."""
    times = [100 * i for i in range(10)] + [1000 + round(1000 * i / 30) for i in range(31)]
    path = write_clip(tmp_path / "a.mkv", count=len(times), times=times)
    shown = indices(path, 0.0, num_frames=15, fps=8)
    assert [times[i] for i in shown] == pytest.approx([1000 * i / 8 for i in range(15)], abs=51)
    assert 3 <= shown[14] - shown[13] <= 4
    assert 1 <= shown[1] - shown[0] <= 2


def test_one_frame_of_a_video_replaces_an_image(clip):
    frames = load_media(LocalFile(clip), Framing(height=HEIGHT, width=WIDTH), draw_centre)
    assert frames.shape == (1, HEIGHT, WIDTH, 3)
    assert index_of(frames[0]) == 20


def ramp(height, width):
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(20, 235, width)[None, :]
    pixels[..., 1] = np.linspace(20, 235, height)[:, None]
    return pixels


def test_an_image_is_no_clip(tmp_path):
    with pytest.raises(BadMedia, match="an image, but clips have 5 frames") as raised:
        load_media(LocalFile(tmp_path / "a.png"), Framing(height=8, width=8, num_frames=5), draw_centre)
    assert raised.value.reason == "too_short"


def test_all_frames_are_scaled_and_cut_alike(tmp_path):
    path = write_clip(tmp_path / "a.mp4", size=(64, 128), pictures=[ramp(64, 128)] * 6, crf="1")
    draw = {"clip": 0.0, "crop_x": 0.8, "crop_y": 0.5}.__getitem__
    frames = load(path, draw, num_frames=4, width=32, crop="random")
    assert frames.shape == (4, 32, 32, 3)
    assert np.abs(frames.astype(int) - frames[0].astype(int)).max() <= 6
    left = 20 + 215 * 0.8 / 2  # 64 of the 128 columns remain, from 0.8 of the free range on
    assert frames[0, :, 0, 0].mean() == pytest.approx(left, abs=5)


def test_a_phone_video_is_turned_upright(tmp_path):
    path = write_clip(tmp_path / "a.mp4", size=(64, 128), pictures=[ramp(64, 128)] * 4, crf="1")
    turn_clip(path, 90)
    assert media_size(LocalFile(path)) == (128, 64)
    frames = load(path, num_frames=2, height=128, width=64)
    want = np.rot90(ramp(64, 128), -1)
    assert np.abs(frames[0].astype(int) - want).max() <= 8


@check_each(
    ("height", "coding"),
    [(64, {}), (64, {"hd": True, "tagged": True}), (HD_HEIGHT, {"hd": True}), (HD_HEIGHT, {"tagged": True})],
)
def test_colours_come_back_by_tag_or_else_by_size(tmp_path, height, coding):
    colours = np.array([[[200, 30, 40], [30, 180, 60], [40, 50, 210], [128, 128, 128]]], np.uint8)
    picture = colours.repeat(height, 0).repeat(16, 1)
    path = write_clip(tmp_path / "a.mp4", size=(height, 64), pictures=[picture] * 2, crf="5", **coding)
    frames = load(path, height=height, width=64, num_frames=1)
    assert np.abs(frames[0][:, 8::16].astype(int) - colours).max() <= 6


@check_each("make", ["truncated", "empty", "missing", "text", "playlist", "folder", "sound"])
def test_unusable_files_have_a_name(clip, tmp_path, make):
    path = tmp_path / "a.mp4"
    content = clip.read_bytes()
    if make == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif make == "empty":
        path.write_bytes(b"")
    elif make == "text":
        path.write_text("<html>404 not found</html>")
    elif make == "playlist":  # FFmpeg would read the file named in the playlist
        path.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{clip}\n#EXT-X-ENDLIST\n")
    elif make == "folder":
        path.mkdir()
    elif make == "sound":
        write_sound(path)
    with pytest.raises(BadMedia, match=r"a\.mp4: .*cannot be decoded") as raised:
        load(path, num_frames=5)
    assert raised.value.reason == "decode"


def write_sound(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 2048), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode(None)])


def test_a_video_cut_short_gives_what_is_there_and_a_name_for_the_rest(tmp_path):
    path = write_clip(tmp_path / "a.mkv", g="8", bf="0", count=40)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * 0.6)])
    whole = (HEIGHT, WIDTH, 3)
    frames = load(path, lambda purpose: 0.0, num_frames=5)
    assert frames.shape == (5, *whole)
    with pytest.raises(BadMedia) as raised:
        load(path, num_frames=40)
    assert raised.value.reason in ("too_short", "decode")


def test_frames_beyond_pillows_limit_are_refused(clip, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH - 1)
    with pytest.raises(BadMedia, match="frames of 32 x 48 pixels exceed the size limit"):
        load(clip)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_anywhere_gives_frames_or_a_named_failure(clip, tmp_path_factory, data):
    content = bytearray(clip.read_bytes())
    for _ in range(data.draw(st.integers(1, 12))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.mp4"
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        frames = load(path, num_frames=5, fps=8)
    except BadMedia as failure:
        assert failure.reason in ("decode", "too_small", "too_short", "low_fps")  # noqa: PT017
    else:
        assert frames.shape == (5, HEIGHT, WIDTH, 3)
