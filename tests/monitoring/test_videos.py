import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from each_case import check_each
from wfm_ds.monitoring.videos import encode_gif, save_mp4


def flat(num_frames, height, width):
    """Every frame of one colour, another one for each frame."""
    colors = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 1, 1, 3), dtype=np.uint8)
    return np.broadcast_to(colors, (num_frames, height, width, 3)).copy()


def decoded(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, stream


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
@settings(deadline=None, max_examples=15)
def test_players_see_every_frame_in_its_colours_and_odd_sizes_are_filled_up(tmp_path_factory, count, height, width):
    video, path = flat(count, height, width), tmp_path_factory.mktemp("mp4") / "a.mp4"
    save_mp4(path, video, 16)
    frames, stream = decoded(path)
    assert frames.shape == (count, height + height % 2, width + width % 2, 3)
    assert np.abs(frames.astype(int) - video[:, :1, :1]).max() <= 3  # 219 levels of luma
    assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")


@check_each("fps", [1, 16, 23.976, 30000 / 1001, 60])
def test_file_plays_at_the_speed_that_was_asked_for(tmp_path, fps):
    save_mp4(tmp_path / "a.mp4", flat(5, 8, 8), fps)
    assert float(decoded(tmp_path / "a.mp4")[1].average_rate) == pytest.approx(fps, rel=1e-6)


def test_picture_keeps_its_place(tmp_path):
    ramp = np.zeros((2, 32, 48, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, 48, dtype=np.uint8)
    ramp[..., 1] = np.linspace(0, 255, 32, dtype=np.uint8)[:, None]
    save_mp4(tmp_path / "a.mp4", ramp, 8)
    assert np.abs(decoded(tmp_path / "a.mp4")[0].astype(int) - ramp).mean() < 4


def test_equal_videos_are_equal_files(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    for name in ("a.mp4", "b.mp4"):
        save_mp4(tmp_path / name, noise, 24)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_index_of_the_file_stands_before_the_frames_so_that_browsers_play_while_loading(tmp_path):
    save_mp4(tmp_path / "a.mp4", flat(5, 16, 16), 16)
    content = (tmp_path / "a.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_gif_plays_all_frames_for_ever():
    video = flat(4, 8, 6)
    with Image.open(io.BytesIO(encode_gif(video, 12.5))) as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"], gif.info["duration"]) == (4, (6, 8), 0, 80)
        for i, frame in enumerate(video):
            gif.seek(i)
            assert np.array_equal(np.asarray(gif.convert("RGB")), frame)


def test_gif_is_never_faster_than_browsers_are():
    with Image.open(io.BytesIO(encode_gif(flat(3, 8, 8), 120))) as gif:
        assert gif.info["duration"] == 20


@check_each("write", [lambda path, *rest: save_mp4(path, *rest), lambda _, *rest: encode_gif(*rest)])
@check_each(
    ("video", "fps", "message"),
    [
        (np.zeros((2, 8, 8, 3)), 16, "uint8.*got float64"),
        (np.zeros((8, 8, 3), np.uint8), 16, r"\[8, 8, 3\]"),
        (np.zeros((0, 8, 8, 3), np.uint8), 16, r"\[0, 8, 8, 3\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), 0, "fps must be positive, got 0"),
        (np.zeros((2, 8, 8, 3), np.uint8), float("nan"), "got nan"),
    ],
)
def test_other_arrays_and_speeds_are_refused(tmp_path, write, video, fps, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a.mp4", video, fps)
    assert list(tmp_path.iterdir()) == []
