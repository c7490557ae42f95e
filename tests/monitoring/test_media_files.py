import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from each_case import check_each
from wfm_ds.monitoring.media_files import GAP, TEXT_HEIGHT, encode_gif, enlarge_image, image_grid, save_mp4, save_png


def noise(seed, height=8, width=6):
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
@settings(deadline=None, max_examples=40)
def test_every_image_is_in_its_cell_and_the_rest_is_white(count, columns, scale, height, width):
    images = [noise(seed, height, width) for seed in range(count)]
    sheet = image_grid(images, columns, scale=scale)
    rows = -(-count // columns)
    cell_height, cell_width = scale * height + GAP, scale * width + GAP
    assert sheet.shape == (rows * cell_height + GAP, columns * cell_width + GAP, 3)
    assert sheet.dtype == np.uint8
    rest = sheet.copy()
    for i, image in enumerate(images):
        y, x = GAP + i // columns * cell_height, GAP + i % columns * cell_width
        cell = sheet[y : y + scale * height, x : x + scale * width]
        assert np.array_equal(cell[scale - 1 :: scale, ::scale], image)
        assert np.array_equal(cell, enlarge_image(image, scale))
        rest[y : y + scale * height, x : x + scale * width] = 255
    assert (rest == 255).all()


def test_labels_and_titles_do_not_touch_the_images():
    images = [noise(seed, 40, 40) for seed in range(4)]
    sheet = image_grid(images, 2, labels=["0.51", "1", "2", "3"], row_titles=["the digit 7", "a cat"])
    row_height = TEXT_HEIGHT + 40 + TEXT_HEIGHT + GAP
    assert sheet.shape == (2 * row_height + GAP, 2 * 42 + GAP, 3)
    for i, image in enumerate(images):
        y, x = GAP + i // 2 * row_height + TEXT_HEIGHT, GAP + i % 2 * 42
        assert np.array_equal(sheet[y : y + 40, x : x + 40], image)
        label = sheet[y + 40 : y + 40 + TEXT_HEIGHT, x : x + 40]
        title = sheet[y - TEXT_HEIGHT : y, GAP:-GAP]
        assert label.min() < 100  # dark text
        assert title.min() < 100


def test_labels_have_their_colors():
    sheet = image_grid([noise(0, 40, 40)] * 2, 2, labels=["1", "1"], label_colors=[(0, 0, 250), (250, 0, 0)])
    for x, darkest in ((GAP, [2]), (2 * GAP + 40, [0])):
        label = sheet[GAP + 40 : GAP + 40 + TEXT_HEIGHT, x : x + 40].astype(int)
        assert [c for c in range(3) if label[..., c].min() > 200] == darkest


def test_text_is_cut_at_its_cell_and_drawn_as_ascii():
    blank = np.full((30, 30, 3), 255, dtype=np.uint8)
    sheet = image_grid([blank, blank], 2, labels=["W" * 50, ""])
    assert sheet[:, : GAP + 31].min() < 100
    assert (sheet[:, GAP + 32 :] == 255).all()
    plain = image_grid([noise(0, 20, 60)], 1, labels=["?? b"])
    assert np.array_equal(image_grid([noise(0, 20, 60)], 1, labels=["\u732b\u732b\nb"]), plain)


def test_smaller_images_sit_at_the_top_left_of_a_cell():
    small, large = noise(0, 4, 4), noise(1, 8, 8)
    sheet = image_grid([small, large], 2)
    assert np.array_equal(sheet[GAP : GAP + 4, GAP : GAP + 4], small)
    assert (sheet[GAP + 4 :, : GAP + 8] == 255).all()


def test_png_is_lossless_and_equal_images_give_equal_bytes(tmp_path):
    image = noise(0, 9, 5)
    for name in ("a.png", "b.png"):
        save_png(tmp_path / name, image)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), image)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def flat(num_frames, height, width):
    """Return a video of single-color frames; each frame has another color."""
    colors = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 1, 1, 3), dtype=np.uint8)
    return np.broadcast_to(colors, (num_frames, height, width, 3)).copy()


def decoded(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, stream


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
@settings(deadline=None, max_examples=15)
def test_videos_have_all_frames_with_correct_colors_and_odd_sizes_are_padded(tmp_path_factory, count, height, width):
    video, path = flat(count, height, width), tmp_path_factory.mktemp("mp4") / "a.mp4"
    save_mp4(path, video, 16)
    frames, stream = decoded(path)
    assert frames.shape == (count, height + height % 2, width + width % 2, 3)
    assert np.abs(frames.astype(int) - video[:, :1, :1]).max() <= 3  # limited-range luma has 219 levels
    assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")


@check_each("fps", [1, 16, 23.976, 30000 / 1001, 60])
def test_a_video_plays_at_the_requested_speed(tmp_path, fps):
    save_mp4(tmp_path / "a.mp4", flat(5, 8, 8), fps)
    assert float(decoded(tmp_path / "a.mp4")[1].average_rate) == pytest.approx(fps, rel=1e-6)


def test_content_keeps_its_position_in_the_frame(tmp_path):
    ramp = np.zeros((2, 32, 48, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, 48, dtype=np.uint8)
    ramp[..., 1] = np.linspace(0, 255, 32, dtype=np.uint8)[:, None]
    save_mp4(tmp_path / "a.mp4", ramp, 8)
    assert np.abs(decoded(tmp_path / "a.mp4")[0].astype(int) - ramp).mean() < 4


def test_equal_videos_give_equal_files_that_browsers_can_stream(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        save_mp4(tmp_path / name, noise(0, 12 * 32, 32).reshape(12, 32, 32, 3), 24)
    content = (tmp_path / "a.mp4").read_bytes()
    assert content == (tmp_path / "b.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # the index precedes the frames


def test_a_gif_loops_over_all_frames():
    video = flat(4, 8, 6)
    with Image.open(io.BytesIO(encode_gif(video, 12.5))) as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"], gif.info["duration"]) == (4, (6, 8), 0, 80)
        for i, frame in enumerate(video):
            gif.seek(i)
            assert np.array_equal(np.asarray(gif.convert("RGB")), frame)
    with Image.open(io.BytesIO(encode_gif(video, 120))) as gif:
        assert gif.info["duration"] == 20  # browsers show shorter delays as 100 ms
