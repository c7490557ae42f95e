"""Labelled image grids and PNG files. All images are uint8 [H,W,3]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

ImageArray: TypeAlias = npt.NDArray[np.uint8]
"""[H,W,3] uint8, RGB."""

GAP = 2  # pixels between cells
TEXT_HEIGHT = 14  # pixels per line of text
BACKGROUND = 255
INK = (0, 0, 0)


def check_image(image: ImageArray) -> None:
    """Raise ValueError unless the array is uint8 [H,W,3] with H, W > 0."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 or image.size == 0:
        raise ValueError(f"an image must be uint8 [H,W,3], got {image.dtype} {list(image.shape)}")


def enlarge_image(image: ImageArray, scale: int) -> ImageArray:
    """Repeat every pixel `scale` times in both directions, so that small images stay sharp."""
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
    row_titles: Sequence[str] | None = None,
) -> ImageArray:
    """Draw images in rows of `columns` on a white background, each enlarged by `scale`. Returns [H,W,3] uint8.

    An image smaller than its cell is aligned top left. labels: a text below each image. row_titles: a text above each
    row. Text that is too wide is truncated. Raises ValueError if there are no images, an image is not uint8 [H,W,3],
    `columns` or `scale` is below 1, or the number of labels or titles is wrong.
    """
    _check_grid(images, columns, scale)
    rows = -(-len(images) // columns)
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images need the same number of labels, got {len(labels)}")
    if row_titles is not None and len(row_titles) != rows:
        raise ValueError(f"{rows} rows need the same number of titles, got {len(row_titles)}")
    image_height = scale * max(image.shape[0] for image in images)
    image_width = scale * max(image.shape[1] for image in images)
    above = TEXT_HEIGHT if row_titles is not None else 0
    below = TEXT_HEIGHT if labels is not None else 0
    row_height = above + image_height + below + GAP
    shape = (rows * row_height + GAP, columns * (image_width + GAP) + GAP, 3)
    canvas = np.full(shape, BACKGROUND, dtype=np.uint8)
    texts: list[tuple[int, int, int, str]] = []  # x, y, width, text
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        x, y = GAP + column * (image_width + GAP), GAP + row * row_height + above
        enlarged = enlarge_image(image, scale)
        canvas[y : y + enlarged.shape[0], x : x + enlarged.shape[1]] = enlarged
        if labels is not None:
            texts.append((x, y + image_height, image_width, labels[i]))
    for row, title in enumerate(row_titles or ()):
        texts.append((GAP, GAP + row * row_height, shape[1] - 2 * GAP, title))
    return _draw_texts(canvas, texts)


def _check_grid(images: Sequence[ImageArray], columns: int, scale: int) -> None:
    if not images:
        raise ValueError("a grid needs at least one image")
    if columns < 1 or scale < 1:
        raise ValueError(f"columns and scale must be at least 1, got {columns} and {scale}")
    for image in images:
        check_image(image)


def _draw_texts(canvas: ImageArray, texts: Sequence[tuple[int, int, int, str]]) -> ImageArray:
    if not texts:
        return canvas
    sheet = Image.fromarray(canvas)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for x, y, width, text in texts:
        draw.text((x, y + 1), _truncate_text(text, width, draw, font), fill=INK, font=font)
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
    """Write an image as a PNG file.

    Raises ValueError if the image is not uint8 [H,W,3]. Raises OSError if writing fails.
    """
    check_image(image)
    Image.fromarray(image).save(path, format="PNG")
