"""Demo of the video quickstart: a bright shape of 3 x 3 cells moves one cell per frame across 8 x 8 black cells.

There are 48 clips: 3 shapes, 4 directions, 2 lanes and 2 start positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.float32]
"""Brightness of cells, from 0 to 1: a frame [8,8] or a clip [5,8,8]."""
Frames = npt.NDArray[np.uint8]
"""RGB frames [T,H,W,3]."""

GRID_SIZE = 8  # cells per side
CELL_PIXELS = 4  # per side
NUM_FRAMES = 5
SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"square": ("###", "###", "###"), "circle": (".#.", "#.#", ".#."), "triangle": (".#.", ".#.", "###")}
)
DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
)
"""{direction: movement (down, right) in cells per frame}."""
LANES = (1, 4)  # first row or column of the shape; lanes do not overlap
START_OFFSETS = (0, 1)  # initial distance from the border in cells; leaves space for the whole motion
NUM_VARIANTS = len(LANES) * len(START_OFFSETS)


@dataclass(frozen=True, slots=True)
class MovingClip:
    shape: str
    direction: str
    variant: int  # index of the (lane, start offset) pair

    @property
    def prompt(self) -> str:
        return f"a {self.shape} moving {self.direction}"


def shape_mask(shape: str) -> Cells:
    """Return the mask [3,3] of the bright cells of a shape."""
    return np.array([[char == "#" for char in row] for row in SHAPES[shape]], np.float32)


@cache
def list_clips() -> tuple[MovingClip, ...]:
    return tuple(MovingClip(*values) for values in itertools.product(SHAPES, DIRECTIONS, range(NUM_VARIANTS)))


def draw_clip(clip: MovingClip) -> Cells:
    down, right = DIRECTIONS[clip.direction]
    lane, start = divmod(clip.variant, len(START_OFFSETS))
    first = START_OFFSETS[start] if down + right > 0 else GRID_SIZE - 3 - START_OFFSETS[start]
    cells = np.zeros((NUM_FRAMES, GRID_SIZE, GRID_SIZE), np.float32)
    for time, frame in enumerate(cells):
        along = first + time * (down + right)
        y, x = (along, LANES[lane]) if down else (LANES[lane], along)
        frame[y : y + 3, x : x + 3] = shape_mask(clip.shape)
    return cells


@cache
def draw_all_clips() -> Cells:
    """Render the cells [48,5,8,8] of all clips, in the order of `list_clips`."""
    return np.stack([draw_clip(clip) for clip in list_clips()])


def render_frames(cells: Cells) -> Frames:
    """Render cells [T,8,8] as grey frames [T,32,32,3]."""
    grey = np.rint(cells * 255).astype(np.uint8).repeat(CELL_PIXELS, axis=1).repeat(CELL_PIXELS, axis=2)
    return np.repeat(grey[..., None], 3, axis=-1)


def measure_cells(frames: Frames) -> Cells:
    """Average the pixels of each frame over a grid of 8 x 8 cells: [5,32,32,3] to [5,8,8].

    Raises ValueError if the frames have a different shape.
    """
    if frames.shape != (NUM_FRAMES, GRID_SIZE * CELL_PIXELS, GRID_SIZE * CELL_PIXELS, 3):
        raise ValueError(
            f"the video has shape {list(frames.shape)}, not "
            f"{[NUM_FRAMES, GRID_SIZE * CELL_PIXELS, GRID_SIZE * CELL_PIXELS, 3]}"
        )
    parts = frames.astype(np.float32).reshape(NUM_FRAMES, GRID_SIZE, CELL_PIXELS, GRID_SIZE, CELL_PIXELS * 3)
    cells: Cells = parts.mean(axis=(2, 4)) / 255
    return cells


def find_nearest_clip(cells: Cells) -> tuple[MovingClip, float]:
    """Return the real clip nearest to cells [5,8,8], and the mean squared error between them."""
    errors = np.square(draw_all_clips() - cells).mean(axis=(1, 2, 3))
    best = int(errors.argmin())
    return list_clips()[best], float(errors[best])
