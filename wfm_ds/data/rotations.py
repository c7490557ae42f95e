"""Convert rotations of robot data sets to matrices: angles, quaternions, rotation vectors, or two matrix columns."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wfm_ds.data.trajectories import rotation_matrix

Doubles: TypeAlias = npt.NDArray[np.float64]


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
