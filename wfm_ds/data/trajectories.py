"""Numeric arrays of clips: read .npy files, convert rotations, merge and scale actions, adapt intrinsics to crops."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.storage.filesystem import read_regular

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]

ACTIONS, POSES, INTRINSICS, DOMAIN = "actions", "c2w", "intrinsics", "domain"
RIGID_TOLERANCE = 1e-3  # tolerance of orthonormal rotations; allows four printed digits
POSE_WIDTH = 9  # numbers of a pose action: translation [3] and the first two columns of the rotation [6]
STATS_KEYS = {"quantile": ("q01", "q99"), "meanstd": ("mean", "std")}  # lists in the stats file, [D] each
# Errors that numpy raises for damaged files.
NPY_ERRORS = (ValueError, TypeError, LookupError, EOFError, SyntaxError, OverflowError, MemoryError, TokenError)


def read_npy(file: IO[bytes]) -> Floats:
    """Read an array of real numbers as float32. Raises ValueError for invalid content and OSError for read errors."""
    try:
        array = np.lib.format.read_array(file, allow_pickle=False)
    except NPY_ERRORS as error:
        raise ValueError("damaged, or not an .npy file of numbers") from error
    return to_float32(array)


def to_float32(array: Any) -> Floats:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise ValueError("not an array of real numbers")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which callers reject
        return array.astype(np.float32)


def compose_actions(actions: Floats, frames: Sequence[int], compose: str | None, rest: str = "first") -> Floats:
    """Return the actions [len(frames)-1,D] between neighbouring selected frames.

    actions: [N-1,D] for N frames. Row i is the action between frames i and i + 1. compose: how to combine several
    actions, `sum` or `pose` (see `compose_poses`). None: raise ValueError if frames are skipped or repeated. rest: see
    `compose_poses`; used only with `pose`.
    """
    spans = list(itertools.pairwise(frames))
    if compose is None and any(stop != start + 1 for start, stop in spans):
        strides = sorted({stop - start for start, stop in spans})
        if 0 in strides:
            raise ValueError(
                "the clip repeats a frame, with no action in between. Set data.actions.compose to use the identity "
                "action, or data.allow_repeats: false"
            )
        raise ValueError(
            f"the clip's frames are {', '.join(map(str, strides))} apart, with several actions in between. Set "
            "data.actions.compose, or data.fps to the rate of the file"
        )
    if compose == "pose":
        if actions.shape[1] < POSE_WIDTH:
            raise ValueError(
                f"data.actions.compose: pose needs {POSE_WIDTH} numbers per pose, got {actions.shape[1]} per action"
            )
        return np.stack([compose_poses(actions, start, stop, rest) for start, stop in spans])
    return np.stack([actions[start:stop].sum(0, dtype=np.float64) for start, stop in spans]).astype(np.float32)


def compose_poses(actions: Floats, start: int, stop: int, rest: str) -> Floats:
    """Combine the actions from frame `start` to frame `stop` into one action.

    An action consists of one or more poses of 9 numbers, followed by fewer than 9 other numbers, such as a gripper
    position. Poses are multiplied. rest: `first` or `last`, the action that provides the other numbers. If start =
    stop, `first` is the action after this frame, and `last` is the action before it.
    """
    width = actions.shape[1] // POSE_WIDTH * POSE_WIDTH
    poses = [pose_product(actions[start:stop, i : i + POSE_WIDTH]) for i in range(0, width, POSE_WIDTH)]
    row = min(start, len(actions) - 1) if rest == "first" else max(stop - 1, 0)
    return np.concatenate([*poses, actions[row, width:]])


def relative_poses(rotations: Doubles, positions: Doubles) -> Doubles:
    """Return the motions [N-1,9] between N neighbouring poses.

    The motion from pose i to pose i + 1 is inv(T_i) @ T_(i+1), where T_i is pose i as a 4 x 4 matrix. Its 9 numbers are
    its translation and the first two columns of its rotation. rotations: [N,3,3]. positions: [N,3].
    """
    inverse = rotations[:-1].swapaxes(1, 2)
    moves = np.einsum("nij,nj->ni", inverse, np.diff(positions, axis=0))
    turns = inverse @ rotations[1:]
    return np.concatenate([moves, turns[:, :, 0], turns[:, :, 1]], axis=1)


def pose_product(poses: Floats) -> Floats:
    """Combine n poses [n,9], each relative to the previous one, into one pose [9]. If n = 0, it is the identity.

    A pose is a translation [3] and the first two columns of a rotation matrix [6] (Zhou et al., CVPR 2019).
    """
    orientation, translation = np.eye(3), np.zeros(3)
    for pose in poses.astype(np.float64):
        translation = translation + orientation @ pose[:3]
        orientation = orientation @ rotation_matrix(pose[3:6], pose[6:])
    return np.concatenate([translation, orientation[:, 0], orientation[:, 1]]).astype(np.float32)


def rotation_matrix(first: Doubles, second: Doubles) -> Doubles:
    """Compute a rotation matrix [3,3] from two columns by Gram-Schmidt. Raises ValueError if they are parallel."""
    x = first / (np.linalg.norm(first) or 1)
    y = second - (x @ second) * x
    if np.linalg.norm(x) == 0 or np.linalg.norm(y) < 1e-6 * np.linalg.norm(second) or not second.any():
        raise ValueError("an action's rotation has two parallel columns")
    y = y / np.linalg.norm(y)
    return np.stack([x, y, np.cross(x, y)], axis=1)


def rotation_matrices(numbers: Doubles, rotation: str) -> Doubles:
    """Convert N rotations, `numbers` [N, numbers per rotation], to matrices [N,3,3].

    rotation: format of the numbers (see PoseRecipe.rotation). Raises ValueError for a quaternion of length 0 and for
    two parallel matrix columns.
    """
    if rotation == "euler_xyz":
        x, y, z = (rotate_about(axis, numbers[:, axis]) for axis in range(3))
        return z @ y @ x
    if rotation == "axis_angle":
        half = np.linalg.norm(numbers, axis=1, keepdims=True) / 2
        return quaternion_matrices(np.concatenate([numbers * np.sinc(half / np.pi) / 2, np.cos(half)], axis=1))
    if rotation == "rot6d":
        return np.stack([rotation_matrix(row[:3], row[3:]) for row in numbers])
    return quaternion_matrices(numbers[:, [1, 2, 3, 0]] if rotation == "quat_wxyz" else numbers)


def rotate_about(axis: int, angles: Doubles) -> Doubles:
    """Return rotations [N,3,3] about axis 0, 1 or 2 by angles [N] in radians."""
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrices = np.tile(np.eye(3), (len(angles), 1, 1))
    matrices[:, i, i] = matrices[:, j, j] = np.cos(angles)
    matrices[:, j, i], matrices[:, i, j] = np.sin(angles), -np.sin(angles)
    return matrices


def quaternion_matrices(quaternions: Doubles) -> Doubles:
    """Convert quaternions [N,4] (x, y, z, w) of any norm to matrices [N,3,3]. Raises ValueError for norm 0."""
    lengths = np.linalg.norm(quaternions, axis=1)
    if (lengths < 1e-8).any():
        raise ValueError("a quaternion is 0 0 0 0")
    x, y, z, w = (quaternions / lengths[:, None]).T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)


def require_rigid(poses: Floats) -> None:
    """Raise ValueError unless each pose in [frames, 4, 4] has a rotation, a translation and the last row 0 0 0 1."""
    rotations = poses[:, :3, :3].astype(np.float64)
    products = np.einsum("fji,fjk->fik", rotations, rotations)
    if np.abs(products - np.eye(3)).max() > RIGID_TOLERANCE or (np.linalg.det(rotations) < 0).any():
        raise ValueError("a pose's rotation is not orthonormal with determinant 1: remove scale and shear")
    if np.abs(poses[:, 3] - np.array([0, 0, 0, 1], np.float32)).max() > RIGID_TOLERANCE:
        raise ValueError("the last row of a pose is not 0 0 0 1")


@dataclass(frozen=True, slots=True)
class ActionScaling:
    """Scaling of actions with D numbers (data.actions.normalize): (actions - low) / scale - offset.

    low and scale are float64 [D].
    """

    low: Doubles
    scale: Doubles
    offset: float

    def __call__(self, actions: Floats) -> Floats:
        """Scale actions [number of actions, D]. Components with scale 0 (constant in the data) become 0."""
        constant = self.scale == 0
        scaled = (actions - self.low) / np.where(constant, 1, self.scale) - self.offset
        return np.where(constant, 0, scaled).astype(np.float32)


def load_scaling(actions: ActionsRecipe, stats: Mapping[str, Sequence[float]] | None = None) -> ActionScaling | None:
    """Return the scaling of the actions. Returns None if actions are not normalized.

    stats: result of `compute_statistics`. None: read the file data.actions.stats. Raises DataError for an invalid file.
    """
    if actions.normalize == "none" or actions.stats is None:
        return None
    first, second = STATS_KEYS[actions.normalize]
    try:
        stats = json.loads(read_regular(Path(actions.stats))) if stats is None else stats
        a, b = (np.asarray(stats[key], np.float64) for key in (first, second))
    except OSError as error:
        raise DataError(f"data.actions.stats: {actions.stats} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(stats, dict) and any(isinstance(one, dict) and "mean" in one for one in stats.values()):
            raise DataError(
                f"data.actions.stats: {actions.stats} is a LeRobot file. Its statistics are per feature, and its "
                "quantiles are not computed over all rows. Set stats: data, or a file that `wfm data stats` wrote"
            ) from error
        raise DataError(
            f"data.actions.stats: {actions.stats} must be a JSON object with the lists {first} and {second}, one "
            "entry per action component"
        ) from error
    if a.ndim != 1 or a.shape != b.shape:
        raise DataError(f"data.actions.stats: {first} and {second} in {actions.stats} must be lists of equal length")
    if not np.isfinite([a, b]).all():
        raise DataError(f"data.actions.stats: {first} or {second} in {actions.stats} has NaN or infinite numbers")
    if actions.normalize == "quantile" and (a > b).any():
        raise DataError(f"data.actions.stats: {first} in {actions.stats} exceeds {second} at index {np.argmax(a > b)}")
    if actions.normalize == "meanstd" and (b < 0).any():
        raise DataError(f"data.actions.stats: {second} in {actions.stats} is negative at index {np.argmax(b < 0)}")
    return ActionScaling(a, (b - a) / 2, 1.0) if actions.normalize == "quantile" else ActionScaling(a, b, 0.0)


def crop_intrinsics(intrinsics: Floats, box: tuple[float, float, float, float], size: tuple[int, int]) -> Floats:
    """Return the intrinsics fx, fy, cx, cy [F,4] of F frames after cropping to `box` and resizing to `size`.

    box: left, top, right, bottom. size: height, width. Coordinate 0 is the left or upper edge of the first pixel.
    """
    left, top, right, bottom = box
    sx, sy = size[1] / (right - left), size[0] / (bottom - top)
    fx, fy, cx, cy = np.moveaxis(intrinsics.astype(np.float64), -1, 0)
    return np.stack([fx * sx, fy * sy, (cx - left) * sx, (cy - top) * sy], axis=-1).astype(np.float32)
