"""Pixels of the training size: how media are framed, and one image decoded. Nothing of captions, order or batches."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps

from wfm_ds.data.samples import Media
from wfm_ds.errors import DataError, UserError

# Only what a training folder may hold: Pillow would otherwise try every format it knows, some through other programs.
FORMATS = ("JPEG", "PNG", "WEBP")
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
BAD_MEDIA = ("decode", "too_small", "too_short", "low_fps", "bad_actions", "bad_input")  # the reasons of BadMedia
# What Pillow's decoders and its EXIF reader raise on damaged files: OSError for most, the others for some headers.
DECODE_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


Draw = Callable[[str], float]
"""A number in [0, 1) for one purpose (`clip`, `crop_x`, `crop_y`), always the same for the same sample and epoch."""


def centre(purpose: str) -> float:
    """The Draw that takes the middle of everything."""
    return 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Selection of the pixels of a medium that are trained on."""

    height: int
    width: int
    num_frames: int = 1
    fps: float | None = None  # of the clip; None: successive frames of the source
    clip: Literal["random", "centre"] = "random"  # where in the source the clip begins
    crop: Literal["random", "centre"] = "centre"
    max_upscale: float = 2.0  # media enlarged by more teach blur
    allow_repeats: bool = False  # a source slower than fps shows frames twice
    span: int | None = None  # frames that a clip's trajectory has, where its pixels have fewer: it begins earlier

    def place(self, draw: Draw) -> tuple[float, float]:
        """Return the place of the crop, across and down: 0 left or top, 1 right or bottom."""
        return (draw("crop_x"), draw("crop_y")) if self.crop == "random" else (0.5, 0.5)


class BadMedia(DataError):
    """One medium that cannot be used: skipped and counted under `reason`, one of BAD_MEDIA."""

    def __init__(self, reason: str, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail} ({reason})")
        self.reason = reason
        self.name = name


@contextlib.contextmanager
def decoding(media: Media, errors: tuple[type[Exception], ...] = DECODE_ERRORS) -> Iterator[None]:
    """Turn what damaged files raise in the block into BadMedia `decode`. A storage that fails is no damaged file."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise BadMedia("decode", media.name, f"cannot be decoded, {type(error).__name__}: {error}") from error


def load_image(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode an image to uint8 [height, width, 3], RGB: upright, scaled to cover the size (bicubic, antialias),
    cropped.

    An image that has the size is returned exactly. Alpha is laid over white, 16-bit grey is rounded to 8 bits, of an
    animation the first picture counts. Raises BadMedia: `decode` for a file that is missing, truncated, of another
    format than JPEG, PNG and WebP or beyond Pillow's limit for decompression bombs; `too_small` if it would have to be
    enlarged by more than max_upscale.
    """
    with decoding(media), media.open() as file, Image.open(file, formats=FORMATS) as image:
        rgb = to_rgb(ImageOps.exif_transpose(image))
    check_size(media, framing, rgb.height, rgb.width)
    return np.array(cover(rgb, framing, framing.place(draw)))


def image_size(media: Media) -> tuple[int, int]:
    """Return height and width of an image as load_image sees it, upright. Reads its header only. Raises BadMedia."""
    with decoding(media), media.open() as file, Image.open(file, formats=FORMATS) as image:
        # Of the base class: a PNG's own decodes all of it in search of an orientation behind the pixels.
        turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) in QUARTER_TURNS
        return (image.width, image.height) if turned else (image.height, image.width)


def check_size(media: Media, framing: Framing, height: int, width: int) -> None:
    """Raise BadMedia `too_small` if this many pixels do not suffice."""
    scale = max(framing.height / height, framing.width / width)
    if scale > framing.max_upscale:
        raise BadMedia(
            "too_small",
            media.name,
            f"{height} x {width} pixels would be enlarged {scale:.2f} times to cover {framing.height} x "
            f"{framing.width}, at most {framing.max_upscale:g} times is allowed",
        )


def cover(rgb: Image.Image, framing: Framing, place: tuple[float, float]) -> Image.Image:
    """Return the picture scaled until it covers height x width, and cut to it at this place."""
    if rgb.size == (framing.width, framing.height):
        return rgb
    return ImageOps.fit(rgb, (framing.width, framing.height), method=Image.Resampling.BICUBIC, centering=place)


def crop_box(size: tuple[int, int], framing: Framing, place: tuple[float, float]) -> tuple[float, float, float, float]:
    """Return what `cover` cuts out of a picture of this height and width: left, top, right and bottom in its pixels."""
    height, width = size
    kept_h = min(height, width * framing.height / framing.width)
    kept_w = min(width, height * framing.width / framing.height)
    left, top = (width - kept_w) * place[0], (height - kept_h) * place[1]
    return left, top, left + kept_w, top + kept_h


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode of a JPEG, PNG or WebP to RGB; what is transparent becomes white."""
    if image.mode.startswith("I;16"):
        return grey16_to_rgb(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def grey16_to_rgb(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to RGB; Pillow's own conversion clips values at 255, which turns such images white."""
    levels = np.asarray(image).astype(np.uint32)
    grey = (levels * 255 + 32767) // 65535
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[levels == transparent] = 255
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
