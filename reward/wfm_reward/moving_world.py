"""The finite world of the video quickstart: a shape of 3 x 3 cells that moves a cell a frame across 8 x 8, bright on
black; and the one of its 48 clips that a video is nearest to. The data shows them, the rewards compare with them.
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
"""Brightness of cells, 0 to 1: [8,8] of a frame, [5,8,8] of a clip."""
Frames = npt.NDArray[np.uint8]
"""[T,H,W,3]."""

SIDE = 8  # cells
CELL = 4  # pixels
NUM_FRAMES = 5
SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"square": ("###", "###", "###"), "circle": (".#.", "#.#", ".#."), "triangle": (".#.", ".#.", "###")}
)
DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
)
"""Steps down and to the right from frame to frame."""
LANES = (1, 4)  # rows or columns that the shape moves along: two that do not overlap
STARTS = (0, 1)  # cells between the shape and the border that it comes from: both leave room for the way
NUM_PLACES = len(LANES) * len(STARTS)


@dataclass(frozen=True, slots=True)
class Clip:
    """One of the world's clips."""

    shape: str
    direction: str
    place: int  # which of the NUM_PLACES pairs of lane and start

    @property
    def prompt(self) -> str:
        return f"a {self.shape} moving {self.direction}"


def mask(shape: str) -> Cells:
    """Return the shape's cells [3,3]."""
    return np.array([[mark == "#" for mark in row] for row in SHAPES[shape]], np.float32)


@cache
def clips() -> tuple[Clip, ...]:
    """Return all clips: shapes, then directions, then places."""
    return tuple(Clip(*one) for one in itertools.product(SHAPES, DIRECTIONS, range(NUM_PLACES)))


def draw(clip: Clip) -> Cells:
    """Return the clip's cells [5,8,8]."""
    down, right = DIRECTIONS[clip.direction]
    lane, start = divmod(clip.place, len(STARTS))
    begins = STARTS[start] if down + right > 0 else SIDE - 3 - STARTS[start]
    cells = np.zeros((NUM_FRAMES, SIDE, SIDE), np.float32)
    for time, frame in enumerate(cells):
        along = begins + time * (down + right)
        y, x = (along, LANES[lane]) if down else (LANES[lane], along)
        frame[y : y + 3, x : x + 3] = mask(clip.shape)
    return cells


@cache
def drawn() -> Cells:
    """Return the cells of all clips, [48,5,8,8]."""
    return np.stack([draw(clip) for clip in clips()])


def pixels(cells: Cells) -> Frames:
    """Return cells [T,8,8] as frames [T,32,32,3]: each cell a grey square."""
    grey = np.rint(cells * 255).astype(np.uint8).repeat(CELL, axis=1).repeat(CELL, axis=2)
    return np.repeat(grey[..., None], 3, axis=-1)


def cells_of(frames: Frames) -> Cells:
    """Return frames [5,32,32,3] as cells [5,8,8]: the mean brightness of each. Raises ValueError for other shapes."""
    if frames.shape != (NUM_FRAMES, SIDE * CELL, SIDE * CELL, 3):
        raise ValueError(f"the video is {list(frames.shape)}, not {[NUM_FRAMES, SIDE * CELL, SIDE * CELL, 3]}")
    parts = frames.astype(np.float32).reshape(NUM_FRAMES, SIDE, CELL, SIDE, CELL * 3)
    cells: Cells = parts.mean(axis=(2, 4)) / 255
    return cells


def nearest(cells: Cells) -> tuple[Clip, float]:
    """Return the clip that these cells [5,8,8] are nearest to, and the mean squared difference from it."""
    errors = np.square(drawn() - cells).mean(axis=(1, 2, 3))
    best = int(errors.argmin())
    return clips()[best], float(errors[best])
