"""The video quickstart's reward: does the shape that was asked for move where it was asked to?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.moving_world import DIRECTIONS, NUM_FRAMES, SHAPES, SIDE, Cells, cells_of, mask

WAY = NUM_FRAMES - 1  # cells from the first to the last frame
ENOUGH_LIGHT = 16  # bright cells: the shapes have 4 to 9


class Moving(Reward):
    """Way that the brightness goes in the direction asked for, 0 to 1 of it, times `what`, 0 to 1.

    `what: shape`, part `identity`: the shape asked for is what goes, in every frame. `what: light`, part `light`: the
    more light goes the better, whatever it looks like: a reward to be fooled. Metadata: `shape`, `direction`.
    """

    name = "moving"
    media = frozenset({"video"})
    outputs: ClassVar = {part: Range(0.0, 1.0) for part in ("moving", "way", "right_way", "identity", "light")}
    primary = "moving"
    needs = ("shape", "direction")

    def __init__(self, device: str = "cpu", *, what: str = "shape") -> None:
        """`what`: shape or light. Raises ValueError for others."""
        super().__init__(device)
        if what not in ("shape", "light"):
            raise ValueError(f"what {what!r} is none of shape and light: name one")
        self.what = what

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        shape, direction = item.metadata["shape"], item.metadata["direction"]
        if shape not in SHAPES or direction not in DIRECTIONS:
            return item.failed(f"no {shape!r} moves {direction!r}: shapes are {[*SHAPES]}, directions {[*DIRECTIONS]}")
        try:
            cells = cells_of(item.frames)
        except ValueError as error:
            return item.failed(str(error))
        gone, alike, bright = way(cells, direction), identity(cells, shape), light(cells)
        value = gone * (alike if self.what == "shape" else bright)
        return item.scored(value, way=gone, right_way=float(gone > 0.5), identity=alike, light=bright)


def way(cells: Cells, direction: str) -> float:
    """Return how far the middle of brightness goes in this direction from the first to the last frame, less what it
    goes aside: 0 to 1 of the way of a clip."""
    places = np.arange(SIDE, dtype=np.float32)
    weights = cells.sum(axis=(1, 2)) + 1e-6
    middles = np.stack([(cells.sum(axis=2) @ places) / weights, (cells.sum(axis=1) @ places) / weights], axis=1)
    down, right = middles[-1] - middles[0]
    sign_down, sign_right = DIRECTIONS[direction]
    ahead = sign_down * down + sign_right * right
    aside = abs(right) if sign_down else abs(down)
    return float(np.clip((ahead - aside) / WAY, 0, 1))


def identity(cells: Cells, shape: str) -> float:
    """Return the mean over frames of 1 - |frame - shape|^2 / |shape|^2, at least 0 each, with the shape where it fits
    best."""
    template = mask(shape)
    windows = np.lib.stride_tricks.sliding_window_view(cells, template.shape, axis=(1, 2))  # [T,6,6,3,3]
    energy = np.square(cells).sum(axis=(1, 2))
    overlap = np.einsum("tyxij,ij->tyx", windows, template).max(axis=(1, 2))
    errors = energy - 2 * overlap + np.square(template).sum()  # of the frame and the shape at its best place
    return float(np.clip(1 - errors / np.square(template).sum(), 0, 1).mean())


def light(cells: Cells) -> float:
    """Return the mean brightness of the frames over that of ENOUGH_LIGHT bright cells, at most 1."""
    return float(min(1.0, cells.sum(axis=(1, 2)).mean() / ENOUGH_LIGHT))
