"""Compute poses of the head camera and the wrists of the AgiBot G1 from the joint angles."""

from __future__ import annotations

from math import pi
from typing import NamedTuple

import numpy as np

from wfm_ds.data.trajectories import Doubles, quaternion_matrices, rotate_about, rotation_matrices

QUARTER = pi / 2


class Joint(NamedTuple):
    """A joint: its pose relative to the previous link, and the state value that moves it.

    The state value is a rotation about z. For the waist lift, it is a translation along z.
    """

    position: tuple[float, float, float]  # metres
    angles: tuple[float, float, float]  # about the fixed axes x, y, z
    state: int | None = None  # column of the state; None: the joint is fixed


WAIST_PITCH, WAIST_LIFT, HEAD_YAW, HEAD_PITCH = 14, 15, 16, 17  # columns 0 to 13: left arm, right arm
WAIST = (Joint((0, 0, 0.3485), (0, 0, 0), WAIST_LIFT), Joint((0.131, 0, 0), (-QUARTER, 0, 0), WAIST_PITCH))


def arm_joints(side: int, shoulder: tuple[Joint, Joint]) -> tuple[Joint, ...]:
    """Return the joints from the base to a gripper. side: 1 for the left arm, -1 for the right arm."""
    first = 0 if side == 1 else 7
    return (
        *WAIST,
        Joint((0, -0.305, 0), (QUARTER, 0, 0)),
        *shoulder,
        Joint((0, 0, 0), (-QUARTER, 0, side * QUARTER), first + 1),
        Joint((0, -0.305, 0), (-QUARTER, side * QUARTER, pi), first + 2),
        Joint((0, 0, 0), (-QUARTER, 0, pi), first + 3),
        Joint((0, -0.1975, 0), (-QUARTER, 0, -pi), first + 4),
        Joint((0, 0, 0), (-QUARTER, 0, 0), first + 5),
        Joint((0, -0.1805, 0), (QUARTER, 0, 0), first + 6),
        Joint((0, 0, 0.0061), (0, 0, 0)),  # the gripper's own rotation and the turn to OpenCV axes cancel
    )


CHAINS = {
    "head": (
        *WAIST,
        Joint((0, -0.441, 0), (QUARTER, 0, 0), HEAD_YAW),
        Joint((0.050238, 0, 0.060065), (-QUARTER, 0, 0), HEAD_PITCH),
        Joint(
            (0.09461925863619018, -0.05452213241733138, -0.016133405411526518),
            (1.2085727642078067, 1.550953767949243, 1.2020721271172658),
        ),
    ),
    "left": arm_joints(1, (Joint((0, 0.025, 0), (-QUARTER, 0, 0)), Joint((0, 0, 0.1859), (0, 0, 0), 0))),
    "right": arm_joints(-1, (Joint((0, -0.025, 0), (-QUARTER, 0, pi)), Joint((0, 0, 0.188), (0, 0, 0), 7))),
}
"""Joints from the base to the head camera or to a gripper, from G1_omnipicker_calibrated.urdf in NVIDIA's
cosmos-framework."""


def agibot_poses(
    link: str, arms: Doubles, head: Doubles, waist: Doubles, position: Doubles, orientation: Doubles
) -> tuple[Doubles, Doubles]:
    """Return the rotations [N,3,3] and positions [N,3] of a link in N frames, in world coordinates.

    link: `head`, `left` or `right`. arms: [N,14], left then right. head: [N,2], yaw and pitch. waist: [N,2], pitch in
    radians and lift in metres. position: [N,3], of the base. orientation: [N,4], quaternions x, y, z, w of the base;
    0 0 0 0 means no rotation.
    """
    states = np.concatenate([arms, waist, head], axis=1)
    resting = (np.linalg.norm(orientation, axis=1) < 1e-8)[:, None]
    rotation = quaternion_matrices(np.where(resting, [0, 0, 0, 1], orientation))
    for joint in CHAINS[link]:
        position = position + rotation @ np.array(joint.position)
        rotation = rotation @ rotation_matrices(np.array([joint.angles]), "euler_xyz")[0]
        if joint.state == WAIST_LIFT:
            position = position + rotation[:, :, 2] * states[:, [WAIST_LIFT]]
        elif joint.state is not None:
            rotation = rotation @ rotate_about(2, states[:, joint.state])
    return rotation, position
