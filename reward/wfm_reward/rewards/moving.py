"""Rewards of the video quickstart: motion of the requested shape, and similarity to real clips (held-out reward)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wfm_reward.base import ItemReward, MediaItem, Range, Score
from wfm_reward.moving_demo import (
    DIRECTIONS,
    GRID_SIZE,
    NUM_FRAMES,
    SHAPES,
    Cells,
    find_nearest_clip,
    measure_cells,
    shape_mask,
)

CLIP_DISTANCE = NUM_FRAMES - 1  # cells moved from the first to the last frame
FULL_LIGHT_CELLS = 16  # bright cells per frame for `light` = 1; the shapes have 4 to 9
MAX_REAL_ERROR = 0.01  # maximum mean squared error of a real clip: 3 wrong cells in 5 frames
MAX_PSNR = 60.0


class MovingReward(ItemReward):
    """Motion in the requested direction, 0 to 1, multiplied by a quality score, 0 to 1.

    The option `what` selects the quality score. With `shape`, it is the part `identity`, which is the similarity to the
    requested shape in every frame. With `light`, it is the part `light`, which depends only on the amount of light, so
    this reward is easy to hack. The reward also reports `way`, the motion, and `right_way`, 1 if `way` exceeds 0.5.
    """

    name = primary_output = "moving"
    media_types = frozenset({"video"})
    outputs: ClassVar = {part: Range(0.0, 1.0) for part in ("moving", "way", "right_way", "identity", "light")}
    required_metadata = ("shape", "direction")

    def __init__(self, device: str = "cpu", *, what: str = "shape") -> None:
        super().__init__(device)
        if what not in ("shape", "light"):
            raise ValueError(f"what is {what!r}; it must be shape or light")
        self.what = what

    def score_item(self, item: MediaItem) -> Score:
        shape, direction = item.metadata["shape"], item.metadata["direction"]
        if shape not in SHAPES or direction not in DIRECTIONS:
            return item.fail(f"unknown shape {shape!r} or direction {direction!r}: use {[*SHAPES]}, {[*DIRECTIONS]}")
        try:
            cells = measure_cells(item.frames)
        except ValueError as error:
            return item.fail(str(error))
        motion, similarity = motion_share(cells, direction), shape_similarity(cells, shape)
        brightness = float(min(1.0, cells.sum(axis=(1, 2)).mean() / FULL_LIGHT_CELLS))
        value = motion * (similarity if self.what == "shape" else brightness)
        return item.score(value, way=motion, right_way=float(motion > 0.5), identity=similarity, light=brightness)


class NearestClip(ItemReward):
    """PSNR in dB, at most 60, between the video and the most similar clip that the demo can draw (the nearest clip).

    The PSNR compares the mean brightness of 8 x 8 cells per frame. The reward also reports four values that are 0.0 or
    1.0: `shape` and `direction`, whether the nearest clip has the requested shape or direction; `both`, whether it has
    both; and `real`, whether the mean squared error between the cells is below .01.
    """

    name = "nearest_clip"
    media_types = frozenset({"video"})
    outputs: ClassVar = {part: Range(0.0, 1.0) for part in ("shape", "direction", "both", "real")} | {
        "psnr": Range(0.0, MAX_PSNR)
    }
    primary_output = "psnr"
    required_metadata = ("shape", "direction")

    def score_item(self, item: MediaItem) -> Score:
        try:
            clip, error = find_nearest_clip(measure_cells(item.frames))
        except ValueError as reason:
            return item.fail(str(reason))
        shape, direction = clip.shape == item.metadata["shape"], clip.direction == item.metadata["direction"]
        return item.score(
            min(MAX_PSNR, -10 * float(np.log10(error + 1e-12))),
            shape=float(shape),
            direction=float(direction),
            both=float(shape and direction),
            real=float(error < MAX_REAL_ERROR),
        )


def motion_share(cells: Cells, direction: str) -> float:
    """Return how far the centre of brightness moves in `direction` between the first and the last frame, 0 to 1.

    1 is the distance that a shape moves in a training clip. Motion perpendicular to `direction` is subtracted.
    """
    positions = np.arange(GRID_SIZE, dtype=np.float32)
    weights = cells.sum(axis=(1, 2)) + 1e-6
    centres = np.stack([(cells.sum(axis=2) @ positions) / weights, (cells.sum(axis=1) @ positions) / weights], axis=1)
    down, right = centres[-1] - centres[0]
    sign_down, sign_right = DIRECTIONS[direction]
    forward = sign_down * down + sign_right * right
    sideways = abs(right) if sign_down else abs(down)
    return float(np.clip((forward - sideways) / CLIP_DISTANCE, 0, 1))


def shape_similarity(cells: Cells, shape: str) -> float:
    """Return the mean over frames of max(0, 1 - |frame - shape|^2 / |shape|^2), at the best position of the shape."""
    template = shape_mask(shape)
    windows = np.lib.stride_tricks.sliding_window_view(cells, template.shape, axis=(1, 2))  # [T,6,6,3,3]
    energy = np.square(cells).sum(axis=(1, 2))
    overlap = np.einsum("tyxij,ij->tyx", windows, template).max(axis=(1, 2))
    errors = energy - 2 * overlap + np.square(template).sum()  # per frame, with the shape at its best position
    return float(np.clip(1 - errors / np.square(template).sum(), 0, 1).mean())
