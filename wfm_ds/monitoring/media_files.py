"""Image and video files, also with sound: PNG, MP4, animated GIF, and image grids."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import Colorspace
from PIL import Image, ImageDraw, ImageFont

ImageArray: TypeAlias = npt.NDArray[np.uint8]
"""[H,W,3] uint8, RGB."""

VideoArray: TypeAlias = npt.NDArray[np.uint8]
"""[T,H,W,3] uint8, RGB."""

SoundArray: TypeAlias = npt.NDArray[np.float32]
"""[channels, samples] float32, in [-1, 1]."""

Color: TypeAlias = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

# x264 quality without visible loss. No B-frames: with B-frames, equal frames can give different bytes.
X264_OPTIONS = {"crf": "18", "bf": "0"}
ENCODER_THREADS = 4  # constant, so that the bytes do not depend on the number of cores
SOUND_LAYOUTS = {1: "mono", 2: "stereo"}  # by number of channels
BT709 = 1  # ITU-T H.273 code of HD video for primaries, transfer and matrix; without it, players guess by the size
MIN_GIF_DELAY_MS = 20  # browsers show shorter delays as 100 ms
GAP = 2  # pixels between cells
TEXT_HEIGHT = 14  # pixels per line of text
BACKGROUND = 255
INK: Color = (0, 0, 0)


def enlarge_image(image: ImageArray, scale: int) -> ImageArray:
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def reduce_image(image: ImageArray, side: int = 512) -> ImageArray:
    """Reduce the image by an integer factor, so that no side is longer than `side` pixels."""
    factor = -(-max(image.shape[:2]) // side)
    return image if factor == 1 else np.asarray(Image.fromarray(image).reduce(factor))


def image_grid(
    images: Sequence[ImageArray],
    columns: int,
    *,
    scale: int = 1,
    labels: Sequence[str] | None = None,
    label_colors: Sequence[Color] | None = None,
    row_titles: Sequence[str] | None = None,
) -> ImageArray:
    """Draw images in rows of `columns` on a white background, each enlarged by `scale`. Returns [H,W,3] uint8.

    An image smaller than its cell is aligned top left. labels: a text below each image. label_colors: their colors,
    default black. row_titles: a text above each row. Text that is too wide is truncated.
    """
    rows = -(-len(images) // columns)
    image_height = scale * max(image.shape[0] for image in images)
    image_width = scale * max(image.shape[1] for image in images)
    above = TEXT_HEIGHT if row_titles is not None else 0
    below = TEXT_HEIGHT if labels is not None else 0
    row_height = above + image_height + below + GAP
    shape = (rows * row_height + GAP, columns * (image_width + GAP) + GAP, 3)
    canvas = np.full(shape, BACKGROUND, dtype=np.uint8)
    texts: list[tuple[int, int, int, str, Color]] = []  # x, y, width, text, color
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        x, y = GAP + column * (image_width + GAP), GAP + row * row_height + above
        enlarged = enlarge_image(image, scale)
        canvas[y : y + enlarged.shape[0], x : x + enlarged.shape[1]] = enlarged
        if labels is not None:
            texts.append((x, y + image_height, image_width, labels[i], label_colors[i] if label_colors else INK))
    for row, title in enumerate(row_titles or ()):
        texts.append((GAP, GAP + row * row_height, shape[1] - 2 * GAP, title, INK))
    return _draw_texts(canvas, texts)


def _draw_texts(canvas: ImageArray, texts: Sequence[tuple[int, int, int, str, Color]]) -> ImageArray:
    if not texts:
        return canvas
    sheet = Image.fromarray(canvas)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for x, y, width, text, color in texts:
        draw.text((x, y + 1), _truncate_text(text, width, draw, font), fill=color, font=font)
    return np.asarray(sheet).copy()


def _truncate_text(
    text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont
) -> str:
    # Pillow's built-in font has Latin characters only; the full prompt is in the text next to the grid.
    line = " ".join(text.encode("ascii", "replace").decode("ascii").split())
    while line and draw.textlength(line, font=font) > width:
        line = line[:-1]
    return line


def save_png(path: Path, image: ImageArray) -> None:
    Image.fromarray(image).save(path, format="PNG")


def save_mp4(
    path: Path, video: VideoArray, fps: float, sound: SoundArray | None = None, sound_rate: int | None = None
) -> None:
    """Write an H.264 video in yuv420p with BT.709 colours and AAC sound, which every browser and player supports.

    Odd sizes are padded by repeating the last row or column. sound_rate: samples per second of `sound`; AAC supports
    8000, 16000, 24000, 48000 and others. Raises OSError if writing fails.
    """
    height, width = video.shape[1:3]
    odd = ((0, height % 2), (0, width % 2), (0, 0))
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        codec = stream.codec_context
        codec.thread_count = ENCODER_THREADS
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        if sound is not None:
            sound_stream = container.add_stream("aac", rate=sound_rate, layout=SOUND_LAYOUTS[len(sound)])
        for image in video:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.pad(image, odd, mode="edge")), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
        container.mux(stream.encode(None))
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(sound.clip(-1, 1)), format="fltp", layout=SOUND_LAYOUTS[len(sound)]
            )
            samples.sample_rate, samples.pts = sound_stream.rate, 0
            container.mux(sound_stream.encode(samples))
            container.mux(sound_stream.encode(None))


def encode_gif(video: VideoArray, fps: float) -> bytes:
    """Return an endlessly looping animated GIF with at most 50 fps."""
    # 256 colours per frame. Pillow's default quantisation is slightly better but a hundred times slower.
    fast_method = Image.Quantize.FASTOCTREE
    first, *others = [Image.fromarray(image).quantize(256, method=fast_method) for image in video]
    delay_ms = max(MIN_GIF_DELAY_MS, 10 * round(100 / fps))  # the unit of the format is 1/100 second
    buffer = io.BytesIO()
    first.save(buffer, format="GIF", save_all=True, append_images=others, duration=delay_ms, loop=0)
    return buffer.getvalue()
