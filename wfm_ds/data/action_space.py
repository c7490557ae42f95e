"""Compute the actions between the frames of a clip from a robot data set (data.actions.space).

T_i is the pose at frame i as a 4 x 4 matrix. The action from frame i to frame j is the motion inv(T_i) @ T_j, as 9
numbers: the translation and the first two columns of the rotation matrix (Zhou et al., CVPR 2019). The presets compute
the same actions as NVIDIA's cosmos-framework (cosmos_framework/data/generator/action/datasets). Cosmos3 was trained
with these actions.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from wfm_ds.data.trajectories import (
    Doubles,
    Floats,
    compose_actions,
    quaternion_matrices,
    relative_poses,
    rotate_about,
    rotation_matrices,
)
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionSpaceRecipe, ActionsRecipe, PoseRecipe, ValueRecipe, Vector, parse_columns

Rows: TypeAlias = Mapping[str, Floats]
"""Features of an episode: {name: [frames of the episode, numbers per frame]}."""
DEFAULT_FEATURE = "action"


class SpacePart(Protocol):
    """Function that computes some of the numbers of each action."""

    @property
    def features(self) -> Mapping[str, int]:
        """{name of a feature that the function reads: minimum number of values per frame}."""

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Doubles | Floats:
        """Return [len(frames)-1, D]: D numbers for each action between two neighbouring frames."""


@dataclass(frozen=True, slots=True)
class StoredActions:
    """Actions that a data set stores as a feature. Row i of the feature is the action between frames i and i + 1."""

    feature: str
    compose: str | None = None
    rest: str = "first"

    @property
    def features(self) -> Mapping[str, int]:
        return {self.feature: 1}

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Floats:
        return compose_actions(rows[self.feature], frames, self.compose, self.rest)


@dataclass(frozen=True, slots=True)
class PoseMotion:
    """Motion of a stored pose between neighbouring frames. Returns [number of frames - 1, 9]."""

    feature: str
    columns: slice  # x, y, z and the rotation
    rotation: str
    turn: tuple[Vector, ...]  # T_i = stored pose * (turn, shift)
    shift: Vector = (0, 0, 0)

    @classmethod
    def from_recipe(cls, recipe: PoseRecipe) -> PoseMotion:
        return cls(recipe.feature, parse_columns(recipe.at), recipe.rotation, recipe.turn, recipe.shift)

    @property
    def features(self) -> Mapping[str, int]:
        return {self.feature: self.columns.stop}

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Doubles:
        states = rows[self.feature][list(frames), self.columns].astype(np.float64)
        matrices = rotation_matrices(states[:, 3:], self.rotation)
        return relative_poses(matrices @ np.array(self.turn), states[:, :3] + matrices @ np.array(self.shift))


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Values of a feature at the start or end frame of each action, such as a gripper position.

    Returns max(scale * value + offset, low) as [number of frames - 1, number of columns].
    """

    feature: str
    columns: slice
    is_next: bool = False  # True: read the end frame of the action, False: its start frame
    scale: float = 1
    offset: float = 0
    low: float = -np.inf
    expected: tuple[float, float] = (-np.inf, np.inf)  # range of the stored values

    @classmethod
    def from_recipe(cls, recipe: ValueRecipe) -> StoredValues:
        columns = slice(None) if recipe.at is None else parse_columns(recipe.at)
        scale, offset = (-1, 1) if recipe.invert else (1, 0)
        return cls(recipe.feature, columns, recipe.row == "next", scale, offset)

    @property
    def features(self) -> Mapping[str, int]:
        return {self.feature: self.columns.stop or 1}

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Doubles:
        chosen = frames[1:] if self.is_next else frames[:-1]
        values = rows[self.feature][list(chosen), self.columns].astype(np.float64)
        if wrong := values[(values < self.expected[0]) | (values > self.expected[1])].tolist():
            least, most = self.expected
            raise ValueError(f"{self.feature} has {wrong[0]:g}, expected {least:g} to {most:g}")
        return (self.scale * values + self.offset).clip(self.low)


@dataclass(frozen=True, slots=True)
class StoredMotion:
    """Motions to the next frame, stored as translation and rotation vector.

    Returns [number of frames - 1, 9]: the translations, and the first two columns of the rotation matrices.
    """

    feature: str

    @property
    def features(self) -> Mapping[str, int]:
        return {self.feature: 6}

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Doubles:
        if (np.diff(frames) != 1).any():
            raise ValueError(
                f"the clip skips or repeats frames, but each row of {self.feature} moves by one frame: set data.fps "
                "to the rate of the file"
            )
        stored = rows[self.feature][list(frames[:-1])].astype(np.float64)
        turns = rotation_matrices(stored[:, 3:6], "axis_angle")
        return np.concatenate([stored[:, :3], turns[:, :, 0], turns[:, :, 1]], axis=1)


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


@dataclass(frozen=True, slots=True)
class AgibotMotion:
    """Motion of a link of the AgiBot G1 between neighbouring frames, computed from the robot's joint angles.

    Returns [number of frames - 1, 9].
    """

    link: str

    @property
    def features(self) -> Mapping[str, int]:
        names = {"joint": 14, "head": 2, "waist": 2, "robot": 3}
        positions = {f"observation.states.{name}.position": width for name, width in names.items()}
        return positions | {"observation.states.robot.orientation": 4}

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Doubles:
        chosen = {name: rows[name][list(frames)].astype(np.float64) for name in self.features}
        return relative_poses(*agibot_poses(self.link, *chosen.values()))


GRIPPER = StoredValues("action", slice(6, 7))
# AgiBot stores its grippers as 0 (open) to 120 degrees (closed), and slightly more in some episodes.
AGIBOT_GRIPPERS = [
    StoredValues("observation.states.effector.position", slice(i, i + 1), True, -1 / 120, 1, 0, (0, 125))
    for i in (0, 1)
]
DROID_TURN = ((0, -1, 0), (1, 0, 0), (0, 0, 1))
BRIDGE_TURN = ((0, -1, 0), (-1, 0, 0), (0, 0, -1))
FRACTAL_TURN = (
    (0.0008686425, 0.9999897671, 0.0044397163),
    (-0.9999987346, 0.0008745501, -0.0013288658),
    (-0.0013327349, -0.0044385564, 0.9999892615),
)
FRACTAL_SHIFT = (-0.0050618476, -0.0016717725, -0.1635144743)
UMI_POSE = "observation.state.right_main_camera_trajectory_xyz_wxyz"
NO_TURN = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
PRESETS: Mapping[str, Sequence[Sequence[SpacePart]]] = {
    "droid": [
        # nvidia/Cosmos3-DROID, in which 1 is a closed gripper
        [
            PoseMotion("observation.state.cartesian_position", slice(0, 6), "euler_xyz", DROID_TURN),
            StoredValues("action.gripper_position", slice(0, 1), scale=-1, offset=1),
        ],
        [PoseMotion("observation.state", slice(0, 6), "euler_xyz", DROID_TURN), GRIPPER],
    ],
    "bridge": [[PoseMotion("observation.state", slice(0, 6), "euler_xyz", BRIDGE_TURN, (0, 0, 0.093575)), GRIPPER]],
    "fractal": [[PoseMotion("observation.state", slice(0, 7), "quat_xyzw", FRACTAL_TURN, FRACTAL_SHIFT), GRIPPER]],
    "libero": [[StoredMotion("action"), GRIPPER]],
    "umi": [
        [
            PoseMotion(UMI_POSE, slice(0, 7), "quat_wxyz", NO_TURN, (0, 0.086, 0.09)),
            StoredValues("observation.state.right_gripper_width_m", slice(0, 1), is_next=True),
        ]
    ],
    "agibot": [
        [AgibotMotion("head"), AgibotMotion("right"), AGIBOT_GRIPPERS[1], AgibotMotion("left"), AGIBOT_GRIPPERS[0]]
    ],
}
"""{preset: lists of parts}. A data set uses the first list for which it has all features."""


@dataclass(frozen=True, slots=True)
class ActionSpace:
    """Computes the actions of a clip from the features of its episode. Thread-safe."""

    choices: Sequence[Sequence[SpacePart]]  # lists of parts; the first with all features is used

    @classmethod
    def from_recipe(cls, recipe: ActionsRecipe) -> ActionSpace:
        space = recipe.space or ActionSpaceRecipe(feature=DEFAULT_FEATURE)
        if isinstance(space, str):
            return cls(PRESETS[space])
        if space.feature is not None:
            return cls([[StoredActions(space.feature, recipe.compose, recipe.rest)]])
        return cls([[*map(PoseMotion.from_recipe, space.poses), *map(StoredValues.from_recipe, space.then)]])

    def find_features(self, widths: Mapping[str, int]) -> list[str]:
        """Return the names of the features to read. widths: {name: numbers per frame} of the data set's features.

        Raises DataError if a feature is missing or has too few numbers per frame.
        """
        needed = list_features(self._choose_parts(widths))
        for name, width in needed.items():
            if name not in widths:
                nearest = difflib.get_close_matches(name, widths, n=max(1, len(widths)), cutoff=0)
                raise DataError(
                    f"data.actions.space: the data set has no feature {name}. It has {', '.join(nearest) or 'none'}"
                )
            if widths[name] < width:
                raise DataError(
                    f"data.actions.space: {name} has {widths[name]} numbers per frame, the space reads {width}"
                )
        return list(needed)

    def count_frames(self, rows: Rows) -> int:
        """Return the number of frames of an episode. Raises KeyError if a feature is missing."""
        return len(rows[next(iter(list_features(self._choose_parts(rows))))])

    def __call__(self, rows: Rows, frames: Sequence[int]) -> Floats:
        """Return the actions between neighbouring frames in `frames`, float32 [len(frames)-1, numbers per action].

        Raises ValueError if the rows of a feature end before the last frame or cannot be used. Raises KeyError if a
        feature is missing.
        """
        parts = self._choose_parts(rows)
        widths = list_features(parts)
        loaded = {name: rows[name] for name in widths}  # each access reads a file
        for name, width in widths.items():
            length, stored = loaded[name].shape
            if length <= frames[-1] or stored < width:
                raise ValueError(
                    f"{name} is [{length}, {stored}], the clip needs row {frames[-1]} and {width} numbers per row"
                )
        return np.concatenate([part(loaded, frames) for part in parts], axis=1).astype(np.float32)

    def _choose_parts(self, names: Collection[str]) -> Sequence[SpacePart]:
        if len(self.choices) == 1:
            return self.choices[0]
        available = set(names)
        return next((parts for parts in self.choices if available >= list_features(parts).keys()), self.choices[0])


def list_features(parts: Sequence[SpacePart]) -> dict[str, int]:
    widths: dict[str, int] = {}
    for part in parts:
        for name, width in part.features.items():
            widths[name] = max(width, widths.get(name, 0))
    return widths
