"""Image decoding: every color mode and orientation, exact pixels if no conversion is needed, and a named error for bad
files."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from each_case import check_each
from wfm_ds.data.media import media_size
from wfm_ds.data.pixels import BadMedia, Framing, draw_centre
from wfm_ds.data.pixels import load_image as load_framed
from wfm_ds.data.samples import LocalFile


def load_image(path, height, width, draw=draw_centre, **framing):
    return load_framed(LocalFile(path), Framing(height=height, width=width, **framing), draw)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ramp(height, width):
    """Return an image that encodes the position in its colors: red increases to the right, green downwards."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return pixels


def saved(tmp_path, image, name="a.png", **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


@check_each(("height", "width"), [(8, 8), (7, 13), (13, 7)])
def test_an_image_of_the_right_size_comes_back_exactly_whatever_its_name(tmp_path, height, width):
    pixels = noise(height, width)
    loaded = load_image(saved(tmp_path, Image.fromarray(pixels)), height, width)
    assert loaded.dtype == np.uint8
    np.testing.assert_array_equal(loaded, pixels)
    # The file decides the format, not its name.
    other = saved(tmp_path, Image.fromarray(pixels), "a.jpg", format="WEBP", lossless=True)
    np.testing.assert_array_equal(load_image(other, height, width), pixels)


# Correct rotation (number of 90 degree turns, counter-clockwise) and mirroring for each EXIF orientation.
UPRIGHT = {
    1: (0, False),
    2: (0, True),
    3: (2, False),
    4: (2, True),
    5: (3, True),
    6: (3, False),
    7: (1, True),
    8: (1, False),
}


@check_each("orientation", range(1, 9))
def test_exif_orientation_is_applied_before_anything_else(tmp_path, orientation):
    pixels = noise(8, 12)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, Image.fromarray(pixels), exif=exif)
    rotations, mirrored = UPRIGHT[orientation]
    want = np.rot90(pixels, rotations)
    want = want[:, ::-1] if mirrored else want
    np.testing.assert_array_equal(load_image(path, *want.shape[:2]), want)
    assert media_size(LocalFile(path)) == want.shape[:2]


def test_grey_palette_and_bilevel_become_rgb(tmp_path):
    grey = noise(6, 6)[..., 0]
    loaded = load_image(saved(tmp_path, Image.fromarray(grey)), 6, 6)
    np.testing.assert_array_equal(loaded, np.repeat(grey[..., None], 3, axis=2))

    palette = Image.new("P", (6, 6), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert np.unique(load_image(saved(tmp_path, palette), 6, 6).reshape(-1, 3), axis=0).tolist() == [[10, 20, 30]]

    assert load_image(saved(tmp_path, Image.new("1", (6, 6), 1)), 6, 6).min() == 255


def test_alpha_is_laid_over_white(tmp_path):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0] = 200
    rgba[..., 3] = 51  # 20 % opaque
    loaded = load_image(saved(tmp_path, Image.fromarray(rgba)), 4, 4)
    assert loaded[0, 0].tolist() == [244, 204, 204]  # 200/5 + 255*4/5, 0/5 + 255*4/5

    grey_alpha = Image.new("LA", (4, 4), (100, 0))
    assert load_image(saved(tmp_path, grey_alpha), 4, 4).min() == 255

    keyed = Image.new("P", (4, 4), 1)
    keyed.putpalette([0, 0, 0, 10, 20, 30])
    assert load_image(saved(tmp_path, keyed, transparency=1), 4, 4).min() == 255


def test_16_bit_grey_keeps_its_shades(tmp_path):
    levels = np.array([[0, 128, 257 * 100], [257 * 200, 65534, 65535]], np.uint16)
    loaded = load_image(saved(tmp_path, Image.fromarray(levels)), 2, 3)
    assert loaded[..., 0].tolist() == [[0, 0, 100], [200, 255, 255]]
    keyed = load_image(saved(tmp_path, Image.fromarray(levels), transparency=257 * 100), 2, 3)
    assert keyed[..., 0].tolist() == [[0, 0, 255], [200, 255, 255]]  # the key color is transparent, so it becomes white


def test_cmyk_jpeg_becomes_rgb(tmp_path):
    path = saved(tmp_path, Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "a.jpg", quality=95)
    assert np.abs(load_image(path, 16, 16).astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"), [(32, 32, (0, 255), (64, 191)), (16, 64, (64, 191), (0, 255))]
)
def test_other_aspect_ratios_are_covered_and_cut_at_both_ends(tmp_path, height, width, rows, columns):
    """A 64 x 128 ramp cropped to a square loses a quarter at the left and at the right; at 1:4, at the top and the
    bottom."""
    loaded = load_image(saved(tmp_path, Image.fromarray(ramp(64, 128))), height, width)
    assert loaded.shape == (height, width, 3)
    for channel, axis, (low, high) in ((1, 0, rows), (0, 1, columns)):
        profile = loaded[..., channel].astype(float).mean(axis=1 - axis)
        assert profile[0] == pytest.approx(low, abs=4.5)
        assert profile[-1] == pytest.approx(high, abs=4.5)
        np.testing.assert_allclose(profile + profile[::-1], 255, atol=2)  # symmetric because the crop is central


@check_each("u", [0.0, 0.3, 0.999])
def test_a_random_crop_is_at_the_drawn_position(tmp_path, u):
    """A 32 x 32 crop of a 64 x 128 ramp keeps half of the width: its left edge has a value between 0 and 127."""
    path = saved(tmp_path, Image.fromarray(ramp(64, 128)))
    loaded = load_image(path, 32, 32, lambda purpose: {"crop_x": u, "crop_y": 0.9}[purpose], crop="random")
    red = loaded[..., 0].astype(float).mean(axis=0)
    assert red[0] == pytest.approx(u * 127.5, abs=4.5)
    assert red[-1] - red[0] == pytest.approx(127.5, abs=9)


def test_shrinking_averages_instead_of_skipping_pixels(tmp_path):
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    loaded = load_image(saved(tmp_path, Image.fromarray(stripes)), 8, 8)
    assert np.abs(loaded.astype(int) - 127).max() <= 6  # nearest-neighbor sampling would give 0 and 255


def test_images_are_enlarged_up_to_twice_and_smaller_ones_refused(tmp_path):
    path = saved(tmp_path, Image.fromarray(noise(8, 8)))
    assert load_image(path, 16, 12).shape == (16, 12, 3)
    with pytest.raises(BadMedia, match=r"8 x 8 pixels need 2\.12 times upscaling to 16 x 17") as raised:
        load_image(path, 16, 17)
    assert (raised.value.reason, raised.value.name) == ("too_small", str(path))
    assert load_image(path, 32, 8, max_upscale=4).shape == (32, 8, 3)
    with pytest.raises(BadMedia, match=r"data\.max_upscale allows 1 "):
        load_image(path, 9, 8, max_upscale=1)


@check_each("make", ["truncated", "empty", "missing", "text", "bitmap", "folder"])
def test_unusable_files_have_a_name(tmp_path, make):
    path = saved(tmp_path, Image.fromarray(noise(64, 64)), "a.jpg")
    if make == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif make == "empty":
        path.write_bytes(b"")
    elif make == "text":
        path.write_text("<html>404 not found</html>")
    elif make == "bitmap":
        Image.fromarray(noise(64, 64)).save(path, format="BMP")  # a format that is not supported in training folders
    else:
        path.unlink()
    if make == "folder":
        path.mkdir()
    with pytest.raises(BadMedia, match=r"a\.jpg: cannot be decoded") as raised:
        load_image(path, 64, 64)
    assert raised.value.reason == "decode"


def test_a_chunk_destroyed_in_the_middle_of_a_png_has_a_name(tmp_path):
    path = saved(tmp_path, Image.fromarray(noise(200, 200)))
    first, second, rest = path.read_bytes().split(b"IDAT", 2)
    path.write_bytes(first + b"IDAT" + second + b"\x00\x01\x02\x03" + rest)
    with pytest.raises(BadMedia, match="cannot be decoded, SyntaxError"):
        load_image(path, 200, 200)


def test_decompression_bombs_are_refused(tmp_path, monkeypatch):
    path = saved(tmp_path, Image.fromarray(noise(64, 64)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 // 2 - 1)
    with pytest.raises(BadMedia, match="DecompressionBombError"):
        load_image(path, 64, 64)


@pytest.fixture(scope="module")
def valid_files():
    files = []
    for kind, options in (("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(noise(24, 24)).save(buffer, kind, exif=exif, **options)
        files.append(buffer.getvalue())
    return files


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_anywhere_gives_pixels_or_a_named_failure(valid_files, tmp_path_factory, data):
    blob = bytearray(data.draw(st.sampled_from(valid_files)))
    for _ in range(data.draw(st.integers(1, 8))):
        blob[data.draw(st.integers(0, min(len(blob), 400) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(blob[: data.draw(st.integers(len(blob) // 2, len(blob)))])
    try:
        loaded = load_image(path, 24, 24)
    except BadMedia as failure:
        assert failure.reason in ("decode", "too_small")  # noqa: PT017
    else:
        assert loaded.shape == (24, 24, 3)
