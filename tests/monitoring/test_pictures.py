import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from each_case import check_each
from wfm_ds.monitoring.images import GAP, TEXT_HEIGHT, enlarge_image, image_grid, save_png


def noise(seed, height=8, width=6):
    return np.random.default_rng(seed).integers(0, 200, (height, width, 3), dtype=np.uint8)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
@settings(deadline=None, max_examples=40)
def test_every_image_stands_in_its_cell_and_the_rest_is_white(count, columns, scale, height, width):
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
        assert label.min() < 100  # ink
        assert title.min() < 100


def test_text_that_is_too_wide_stays_in_its_cell():
    blank = np.full((30, 30, 3), 255, dtype=np.uint8)
    sheet = image_grid([blank, blank], 2, labels=["W" * 50, ""])
    assert sheet[:, : GAP + 31].min() < 100
    assert (sheet[:, GAP + 32 :] == 255).all()


def test_text_beyond_ascii_and_newlines_is_drawn_somehow():
    plain = image_grid([noise(0, 20, 60)], 1, labels=["?? b"])
    assert np.array_equal(image_grid([noise(0, 20, 60)], 1, labels=["\u732b\u732b\nb"]), plain)


def test_smaller_images_sit_at_the_top_left_of_a_cell():
    small, large = noise(0, 4, 4), noise(1, 8, 8)
    sheet = image_grid([small, large], 2)
    assert np.array_equal(sheet[GAP : GAP + 4, GAP : GAP + 4], small)
    assert (sheet[GAP + 4 :, : GAP + 8] == 255).all()


@check_each(
    ("arguments", "message"),
    [
        (([], 1), "at least one image"),
        (([noise(0)], 0), "at least 1, got 0 and 1"),
        (([noise(0).astype(float)], 1), r"uint8 \[H,W,3\], got float64 \[8, 6, 3\]"),
        (([noise(0)[..., 0]], 1), r"got uint8 \[8, 6\]"),
        (([noise(0)[:0]], 1), r"got uint8 \[0, 6, 3\]"),
    ],
)
def test_other_arrays_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        image_grid(*arguments)


def test_counts_must_fit():
    with pytest.raises(ValueError, match="3 images need the same number of labels, got 2"):
        image_grid([noise(0)] * 3, 2, labels=["a", "b"])
    with pytest.raises(ValueError, match="2 rows need the same number of titles, got 3"):
        image_grid([noise(0)] * 3, 2, row_titles=["a", "b", "c"])


def test_png_keeps_every_pixel_and_the_same_image_gives_the_same_bytes(tmp_path):
    image = noise(0, 9, 5)
    for name in ("a.png", "b.png"):
        save_png(tmp_path / name, image)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), image)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with pytest.raises(ValueError, match="got float32"):
        save_png(tmp_path / "c.png", image.astype(np.float32))
    assert not (tmp_path / "c.png").exists()
