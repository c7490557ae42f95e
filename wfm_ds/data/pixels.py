"""Decode images, and resize and crop them to the training size."""

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
from wfm_ds.storage.filesystem import LFS_ADVICE, LFS_SIGN

# Supported formats. By default Pillow tries all its formats, some of them through external programs.
FORMATS = ("JPEG", "PNG", "WEBP")
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
# Values of BadMedia.reason.
BAD_MEDIA_REASONS = ("decode", "too_small", "too_short", "low_fps", "bad_actions", "bad_input", "no_sound")
# Errors of Pillow's decoders and EXIF reader for damaged files: mostly OSError, others for some headers.
DECODE_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


Draw = Callable[[str], float]
"""Function that maps `clip`, `crop_x` or `crop_y` to a random number in [0, 1), fixed per sample and epoch."""


def draw_centre(purpose: str) -> float:
    """Return 0.5: a `Draw` function for centre crops, and for clips from the middle of a video."""
    return 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Settings for converting an image or video to training pixels: size, crop and choice of frames."""

    height: int
    width: int
    num_frames: int = 1
    fps: float | None = None  # of the clip; None: consecutive frames of the file
    clip: Literal["random", "centre"] = "random"  # position of the clip in the video
    crop: Literal["random", "centre"] = "centre"
    video_resize: Literal["pillow", "swscale"] = "pillow"  # resizes the frames of videos
    max_upscale: float = 2.0  # larger factors would teach blur
    allow_repeats: bool = False  # repeat frames of videos slower than fps
    span: int | None = None  # frames covered by the inputs, if only the first num_frames of them are decoded
    sound_rate: int | None = None  # samples per second of the sound to decode with each clip; None: no sound

    def crop_position(self, draw: Draw) -> tuple[float, float]:
        """Return the (x, y) position of the crop: 0 is the left or upper edge, 1 is the right or lower edge."""
        return (draw("crop_x"), draw("crop_y")) if self.crop == "random" else (0.5, 0.5)


class BadMedia(DataError):
    """Raised for an unusable image or video. The file is skipped and counted under `reason` (BAD_MEDIA_REASONS)."""

    def __init__(self, reason: str, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail} ({reason})")
        self.reason = reason
        self.name = name
        self.detail = detail


@contextlib.contextmanager
def convert_decode_errors(media: Media, errors: tuple[type[Exception], ...] = DECODE_ERRORS) -> Iterator[None]:
    """Convert decoding errors in the `with` block to BadMedia with reason `decode`. UserErrors are not converted."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        detail = f"is {LFS_ADVICE}" if is_lfs_pointer(media) else f"cannot be decoded, {type(error).__name__}: {error}"
        raise BadMedia("decode", media.name, detail) from error


def is_lfs_pointer(media: Media) -> bool:
    try:
        with media.open() as file:
            return file.read(len(LFS_SIGN)) == LFS_SIGN
    except (OSError, UserError):
        return False


def decode_image(media: Media) -> Image.Image:
    """Decode an image as RGB, upright. Raises BadMedia with reason `decode`."""
    with convert_decode_errors(media), media.open() as file, Image.open(file, formats=FORMATS) as image:
        return to_rgb(ImageOps.exif_transpose(image))


def load_image(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode an image to uint8 RGB [height, width, 3], in the size of the framing.

    The image is rotated upright, resized (bicubic, antialiased) until it covers the framing's size, and cropped. An
    image that already has this size is not resampled. Transparent images are blended over white, 16-bit grey is rounded
    to 8 bits, and animations yield their first frame.

    Raises BadMedia with reason `too_small` if the image must be enlarged by more than max_upscale. Raises BadMedia with
    reason `decode` if the file is missing, damaged, above Pillow's size limit, or not JPEG, PNG or WebP.
    """
    rgb = decode_image(media)
    check_size(media, framing, rgb.height, rgb.width)
    return np.array(crop_to_cover(rgb, framing, framing.crop_position(draw)))


def image_size(media: Media) -> tuple[int, int]:
    """Return the shown size (height, width) of an image, rotated as its file says. Reads a header. Raises BadMedia."""
    with convert_decode_errors(media), media.open() as file, Image.open(file, formats=FORMATS) as image:
        # Use the base class: PNG's override decodes the whole image to find an orientation after the pixels.
        is_rotated = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) in QUARTER_TURNS
        return (image.width, image.height) if is_rotated else (image.height, image.width)


def check_size(media: Media, framing: Framing, height: int, width: int) -> None:
    """Raise BadMedia with reason `too_small` if an image of this size must be enlarged by more than max_upscale."""
    scale = max(framing.height / height, framing.width / width)
    if scale > framing.max_upscale:
        raise BadMedia(
            "too_small",
            media.name,
            f"{height} x {width} pixels need {scale:.2f} times upscaling to {framing.height} x {framing.width}, "
            f"data.max_upscale allows {framing.max_upscale:g}",
        )


def crop_to_cover(rgb: Image.Image, framing: Framing, position: tuple[float, float]) -> Image.Image:
    """Resize an image until it covers the framing's height x width, then crop it to this size at `position`."""
    if rgb.size == (framing.width, framing.height):
        return rgb
    return ImageOps.fit(rgb, (framing.width, framing.height), method=Image.Resampling.BICUBIC, centering=position)


def crop_box(
    size: tuple[int, int], framing: Framing, position: tuple[float, float]
) -> tuple[float, float, float, float]:
    """Return the box (left, top, right, bottom) that `crop_to_cover` keeps, in pixels of the original image.

    size: (height, width) of the original image.
    """
    height, width = size
    crop_height = min(height, width * framing.height / framing.width)
    crop_width = min(width, height * framing.width / framing.height)
    left, top = (width - crop_width) * position[0], (height - crop_height) * position[1]
    return left, top, left + crop_width, top + crop_height


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a JPEG, PNG or WebP image in any mode to RGB. Transparent pixels become white."""
    if image.mode.startswith("I;16"):
        return grey16_to_rgb(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def grey16_to_rgb(image: Image.Image) -> Image.Image:
    levels = np.asarray(image).astype(np.uint32)
    grey = (levels * 255 + 32767) // 65535
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[levels == transparent] = 255
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
