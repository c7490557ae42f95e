"""Images as people look at them: labelled grids and PNG files. Everything is uint8 [H,W,3]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Picture: TypeAlias = npt.NDArray[np.uint8]
"""[H,W,3] uint8, RGB."""

GAP = 2  # pixels between cells
TEXT_HEIGHT = 14  # pixels of a line of text
BACKGROUND = 255
INK = (0, 0, 0)


def check_picture(image: Picture) -> None:
    """Raise ValueError unless the array is uint8 [H,W,3] with H, W > 0."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 or image.size == 0:
        raise ValueError(f"an image must be uint8 [H,W,3], got {image.dtype} {list(image.shape)}")


def enlarge(image: Picture, scale: int) -> Picture:
    """Make every pixel a square of scale x scale pixels, without smoothing, so that small images stay as they are."""
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def reduced(image: Picture, side: int = 512) -> Picture:
    """The image by a whole factor smaller, so that no side is longer than that."""
    factor = -(-max(image.shape[:2]) // side)
    return image if factor == 1 else np.asarray(Image.fromarray(image).reduce(factor))


def grid(
    images: Sequence[Picture],
    columns: int,
    *,
    scale: int = 1,
    labels: Sequence[str] | None = None,
    row_titles: Sequence[str] | None = None,
) -> Picture:
    """The images in rows of `columns`, on white, each enlarged by `scale`; smaller ones sit at the top left of a cell.

    `labels` (one per image) stand below the images, `row_titles` (one per row) above the rows. Text that is too wide
    is cut. Returns [H,W,3] uint8. Raises ValueError on no images, other shapes or counts that do not fit.
    """
    _check_grid(images, columns, scale)
    rows = -(-len(images) // columns)
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images need as many labels, got {len(labels)}")
    if row_titles is not None and len(row_titles) != rows:
        raise ValueError(f"{rows} rows need as many titles, got {len(row_titles)}")
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
        picture = enlarge(image, scale)
        canvas[y : y + picture.shape[0], x : x + picture.shape[1]] = picture
        if labels is not None:
            texts.append((x, y + image_height, image_width, labels[i]))
    for row, title in enumerate(row_titles or ()):
        texts.append((GAP, GAP + row * row_height, shape[1] - 2 * GAP, title))
    return _write(canvas, texts)


def _check_grid(images: Sequence[Picture], columns: int, scale: int) -> None:
    if not images:
        raise ValueError("a grid needs at least one image")
    if columns < 1 or scale < 1:
        raise ValueError(f"columns and scale must be at least 1, got {columns} and {scale}")
    for image in images:
        check_picture(image)


def _write(canvas: Picture, texts: Sequence[tuple[int, int, int, str]]) -> Picture:
    if not texts:
        return canvas
    sheet = Image.fromarray(canvas)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for x, y, width, text in texts:
        draw.text((x, y + 1), _cut(text, width, draw, font), fill=INK, font=font)
    return np.asarray(sheet).copy()


def _cut(text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    # Pillow's built-in font has no glyphs beyond Latin; the full prompt stands in the text beside the grid.
    line = " ".join(text.encode("ascii", "replace").decode("ascii").split())
    while line and draw.textlength(line, font=font) > width:
        line = line[:-1]
    return line


def save_png(path: Path, image: Picture) -> None:
    """Write one image [H,W,3] uint8, without loss. Raises ValueError on other arrays, OSError if it cannot write."""
    check_picture(image)
    Image.fromarray(image).save(path, format="PNG")
