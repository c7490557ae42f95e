"""Actions and camera paths of a clip: composed, scaled, cropped. Pure but for the file of stats."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import DataError
from wfm_ds.recipe.data import ActionsRecipe

Floats: TypeAlias = npt.NDArray[np.float32]

ACTIONS, POSES, INTRINSICS, DOMAIN = "actions", "c2w", "intrinsics", "domain"
RIGID = 1e-3  # to which a rotation is orthonormal: printed with four digits it still is
POSE_WIDTH = 9  # of an action that is a pose: translation [3], and the first two columns of its rotation [6]
KEYS = {"quantile": ("q01", "q99"), "meanstd": ("mean", "std")}  # of a stats file, [D] each


def composed(actions: Floats, frames: Sequence[int], compose: str | None) -> Floats:
    """Return the actions [len(frames)-1,D] that move each of these frames to the next: row i of `actions` [N-1,D] moves
    frame i to i + 1.

    compose: how several become one, `sum` or `pose` (see `pose_product`); None refuses to. Raises ValueError.
    """
    spans = list(itertools.pairwise(frames))
    if compose is None and any(stop != start + 1 for start, stop in spans):
        strides = sorted({stop - start for start, stop in spans})
        if 0 in strides:
            raise ValueError(
                "the clip shows a frame twice in a row, and no action lies between: set data.actions.compose, whose "
                "action is then the one that does not move, or data.allow_repeats: false"
            )
        raise ValueError(
            f"the clip's frames are {', '.join(map(str, strides))} apart, and so several actions lie between two of "
            "them: set data.actions.compose, or the data.fps of the file"
        )
    if compose == "pose":
        if actions.shape[1] != POSE_WIDTH:
            raise ValueError(f"data.actions.compose: pose needs {POSE_WIDTH} numbers an action, not {actions.shape[1]}")
        return np.stack([pose_product(actions[start:stop]) for start, stop in spans])
    return np.stack([actions[start:stop].sum(0, dtype=np.float64) for start, stop in spans]).astype(np.float32)


def pose_product(poses: Floats) -> Floats:
    """Return the one relative pose [9] that equals these [n,9], each in the frame of the one before; without any the
    pose that does not move. A rotation is its first two columns, made orthonormal (Zhou et al., CVPR 2019)."""
    turned, moved = np.eye(3), np.zeros(3)
    for pose in poses.astype(np.float64):
        moved = moved + turned @ pose[:3]
        turned = turned @ rotation(pose[3:6], pose[6:])
    return np.concatenate([moved, turned[:, 0], turned[:, 1]]).astype(np.float32)


def rotation(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rotation [3,3] whose first two columns are these, made orthonormal. Raises ValueError where they do
    not span a plane."""
    x = first / (np.linalg.norm(first) or 1)
    y = second - (x @ second) * x
    if np.linalg.norm(x) == 0 or np.linalg.norm(y) < 1e-6 * np.linalg.norm(second) or not second.any():
        raise ValueError("an action's rotation has two columns of one direction")
    y = y / np.linalg.norm(y)
    return np.stack([x, y, np.cross(x, y)], axis=1)


def require_rigid(poses: Floats) -> None:
    """Raises ValueError unless each of the poses [F,4,4] is a rotation and a translation: orthonormal to RIGID, with
    determinant 1, and the last row 0 0 0 1."""
    turns = poses[:, :3, :3].astype(np.float64)
    products = np.einsum("fji,fjk->fik", turns, turns)
    if np.abs(products - np.eye(3)).max() > RIGID or (np.linalg.det(turns) < 0).any():
        raise ValueError("a pose has no orthonormal rotation of determinant 1: give rotations without scale or shear")
    if np.abs(poses[:, 3] - np.array([0, 0, 0, 1], np.float32)).max() > RIGID:
        raise ValueError("the last row of a pose is not 0 0 0 1")


@dataclass(frozen=True, slots=True)
class Scaling:
    """(actions - low) / spread - offset: what `data.actions.normalize` does. low and spread are [D] float64."""

    low: npt.NDArray[np.float64]
    spread: npt.NDArray[np.float64]
    offset: float

    def __call__(self, actions: Floats) -> Floats:
        """A number that never changes becomes 0."""
        still = self.spread == 0
        scaled = (actions - self.low) / np.where(still, 1, self.spread) - self.offset
        return np.where(still, 0, scaled).astype(np.float32)


def scaling_of(actions: ActionsRecipe) -> Scaling | None:
    """Read the stats of data.actions; None where actions stay as they are. Raises DataError for a file that has not
    the lists that data.actions.normalize needs."""
    if actions.normalize == "none" or actions.stats is None:
        return None
    first, second = KEYS[actions.normalize]
    try:
        found = json.loads(Path(actions.stats).read_bytes())
        a, b = (np.asarray(found[key], np.float64) for key in (first, second))
    except OSError as error:
        raise DataError(f"data.actions.stats: {actions.stats} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data.actions.stats: {actions.stats} must be a JSON object with the lists {first} and {second}, a number "
            "for each of an action's"
        ) from error
    if a.ndim != 1 or a.shape != b.shape:
        raise DataError(f"data.actions.stats: {first} and {second} of {actions.stats} are not two equally long lists")
    if not np.isfinite([a, b]).all():
        raise DataError(f"data.actions.stats: {first} and {second} of {actions.stats} have NaN or infinite numbers")
    if actions.normalize == "quantile" and (a > b).any():
        raise DataError(f"data.actions.stats: {first} of {actions.stats} is above {second} in number {above(a, b)}")
    if actions.normalize == "meanstd" and (b < 0).any():
        raise DataError(f"data.actions.stats: {second} of {actions.stats} is negative in number {above(0 * b, b)}")
    return Scaling(a, (b - a) / 2, 1.0) if actions.normalize == "quantile" else Scaling(a, b, 0.0)


def above(low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> int:
    """Return the first place where `low` is the higher one."""
    return int(np.argmax(low > high))


def cropped_intrinsics(intrinsics: Floats, box: tuple[float, float, float, float], size: tuple[int, int]) -> Floats:
    """Return [fx, fy, cx, cy] [F,4] of pixels that were cut to `box` (left, top, right, bottom) and scaled to `size`
    (height, width). 0 is the left or upper edge of the first pixel."""
    left, top, right, bottom = box
    sx, sy = size[1] / (right - left), size[0] / (bottom - top)
    fx, fy, cx, cy = np.moveaxis(intrinsics.astype(np.float64), -1, 0)
    return np.stack([fx * sx, fy * sy, (cx - left) * sx, (cy - top) * sy], axis=-1).astype(np.float32)


def is_numeric(array: Any) -> bool:
    """Return whether it is an array of real numbers."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
