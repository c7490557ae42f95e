"""Schema of the recipe section `data.actions`, and the table of the robots that Cosmos3 was trained on."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Discriminator, Field, PositiveInt, Tag, model_validator

from wfm_ds.recipe.section import Section, UserPath, value_form
from wfm_ds.recipe.tree import shorten_text

ROTATION_WIDTHS = {"euler_xyz": 3, "axis_angle": 3, "quat_xyzw": 4, "quat_wxyz": 4, "rot6d": 6}
TURN_TOLERANCE = 1e-3

Columns = Annotated[str, Field(pattern=r"^[0-9]{1,4}:[0-9]{1,4}$")]
"""Columns of a feature like a Python slice: `0:6` for the first six numbers."""
Vector = tuple[float, float, float]
SpaceName = Literal["droid", "bridge", "fractal", "libero", "umi", "agibot"]


@dataclass(frozen=True, slots=True)
class Embodiment:
    """A robot in the training data of Cosmos3."""

    domain: int  # index of the network's action weights
    width: int | None = None  # numbers per action; None: not fixed
    space: SpaceName | None = None  # action space that makes these actions from stored states


EMBODIMENTS = {
    "no_action": Embodiment(0),
    "av": Embodiment(1, 9),
    "camera_pose": Embodiment(2, 9),
    "hand_pose": Embodiment(3),
    "pusht": Embodiment(4, 2),
    "libero": Embodiment(5, None, "libero"),
    "umi": Embodiment(6, 10, "umi"),
    "bridge_orig_lerobot": Embodiment(7, 10, "bridge"),
    "droid_lerobot": Embodiment(8, 10, "droid"),
    "robomind-franka": Embodiment(8, 10),
    "galbot": Embodiment(9, 30),
    "robomind-franka-dual": Embodiment(12, 20),
    "robomind-ur": Embodiment(13, 10),
    "agibotworld": Embodiment(15, 29, "agibot"),
    "xdof_yam": Embodiment(16, 20),
    "robotwin": Embodiment(17, 14),
    "fractal": Embodiment(20, 10, "fractal"),
    "drawanything": Embodiment(21, 3),
    "behavior1k_lerobot": Embodiment(22, 23),
    "maniparena": Embodiment(23, 20),
}
"""Robots by name, from the tables of cosmos-framework (data/generator/action/utils/domain_utils.py) and diffusers."""


def check_domain(domain: int | str) -> int | str:
    """Return the domain. Raises ValueError for an unknown name."""
    if isinstance(domain, str) and domain not in EMBODIMENTS:
        nearest = difflib.get_close_matches(domain, EMBODIMENTS, n=1, cutoff=0)
        known = ", ".join(EMBODIMENTS)
        raise ValueError(f"unknown robot {shorten_text(domain)}: did you mean {nearest[0]}? Known are {known}")
    return domain


Domain = Annotated[Annotated[int, Field(ge=0)] | str, AfterValidator(check_domain)]


VIEWPOINTS = ("ego_view", "third_person_view", "wrist_view", "concat_view", "top_down_2d_view", "video_game_view")


def check_viewpoint(viewpoint: str) -> str:
    """Return `viewpoint` if it is in VIEWPOINTS or a description of at least two words. Otherwise raise ValueError."""
    if viewpoint not in VIEWPOINTS and " " not in viewpoint.strip():
        nearest = difflib.get_close_matches(viewpoint, VIEWPOINTS, n=1, cutoff=0)
        shown = shorten_text(viewpoint)
        raise ValueError(f"unknown view {shown}: did you mean {nearest[0]}? Or describe the view in a sentence")
    return viewpoint


Viewpoint = Annotated[str, AfterValidator(check_viewpoint)]


def find_embodiment(domain: int | str) -> Embodiment:
    """Return the robot of a domain. If no known robot has this number, return an Embodiment without width and space."""
    if isinstance(domain, str):
        return EMBODIMENTS[domain]
    return next((robot for robot in EMBODIMENTS.values() if robot.domain == domain), Embodiment(domain))


def parse_columns(columns: str) -> slice:
    """Convert text such as "0:6" to a slice. Raises ValueError if the slice would be empty."""
    start, stop = map(int, columns.split(":"))
    if start >= stop:
        raise ValueError(f"columns {columns} are empty: write first:last+1, such as 0:6")
    return slice(start, stop)


def is_rotation(rows: tuple[Vector, Vector, Vector]) -> bool:
    """Return whether the rows form a rotation matrix, up to rounding."""
    x, y, z = np.array(rows, float)
    errors = [np.linalg.norm(x) - 1, np.linalg.norm(y) - 1, x @ y, np.linalg.norm(np.cross(x, y) - z)]
    return bool(np.abs(errors).max() < TURN_TOLERANCE)


class PoseRecipe(Section):
    """A stored pose of the robot. Its motion between two frames of the clip becomes 9 numbers of the action: the
    translation (3 numbers) and the first two columns of the rotation matrix (6 numbers)."""

    feature: str
    """Feature with the pose: x, y, z, then the rotation."""
    at: Columns
    """Columns of the feature, such as `0:6`."""
    rotation: Literal["euler_xyz", "axis_angle", "quat_xyzw", "quat_wxyz", "rot6d"]
    """Format of the rotation. `euler_xyz`: angles about the fixed axes x, y, z in this order, in radians. `rot6d`: the
    first two columns of the matrix."""
    turn: tuple[Vector, Vector, Vector] = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    """Rotation matrix from the stored axes of the gripper to the axes of the model. The stored rotation is multiplied
    by this matrix from the right. Cosmos3 uses the axes of OpenCV: x to the right, y down, z forward."""
    shift: Vector = (0, 0, 0)
    """Offset from the stored position to the point whose motion the model receives, such as the camera, in the stored
    axes of the gripper."""

    @model_validator(mode="after")
    def _check_pose(self) -> PoseRecipe:
        columns, width = parse_columns(self.at), 3 + ROTATION_WIDTHS[self.rotation]
        if columns.stop - columns.start != width:
            raise ValueError(f"a pose with {self.rotation} has {width} numbers, columns {self.at} do not")
        if not is_rotation(self.turn):
            raise ValueError("turn is not a rotation matrix: its rows must be orthonormal, with determinant 1")
        return self


class ValueRecipe(Section):
    """Numbers that are used as stored, such as the state of a gripper."""

    feature: str
    """Feature with the numbers."""
    at: Columns | None = None
    """Columns of the feature, such as `6:7`. Unset: all."""
    row: Literal["first", "next"] = "first"
    """Row of the feature. `first`: the row of the frame before the action. `next`: the row of the frame after the
    action."""
    invert: bool = False
    """Use 1 - x, for example if 1 is a closed gripper and the model expects 1 for an open one."""

    @model_validator(mode="after")
    def _check_columns(self) -> ValueRecipe:
        if self.at is not None:
            parse_columns(self.at)
        return self


class ActionSpaceRecipe(Section):
    """Computation of actions from the features of a robot data set. Set either `feature`, or `poses` and `then`."""

    feature: str | None = None
    """Feature with the actions as stored: row i is the action between frames i and i + 1."""
    poses: list[PoseRecipe] = Field(default_factory=list)
    """Stored poses. The motion of each pose from one frame of the clip to the next becomes a part of the action. Unlike
    stored actions, it needs no `compose` if `data.fps` is below the frame rate of the file."""
    then: list[ValueRecipe] = Field(default_factory=list)
    """Values that follow the motion of the poses in an action, such as the state of a gripper."""

    @model_validator(mode="after")
    def _check_parts(self) -> ActionSpaceRecipe:
        if (self.feature is None) != bool(self.poses or self.then):
            raise ValueError("set feature: NAME for actions as stored, or poses and then, not both")
        return self


class ActionsRecipe(Section):
    """Settings that compute, normalize and combine actions. Used only if `data.inputs` contains `actions`."""

    space: (
        Annotated[
            Annotated[SpaceName, Tag("scalar")] | Annotated[ActionSpaceRecipe, Tag("mapping")],
            Discriminator(value_form),
        ]
        | None
    ) = None
    """lerobot: how actions are computed from the stored features. A name selects the computation of NVIDIA's
    cosmos-framework for this data set (docs/robots.md). Unset: the feature `action` as stored."""
    width: PositiveInt | None = None
    """Numbers per action. Samples with a different width are invalid. Unset: the width of `stats`. If `stats` is unset
    too, the most common width among the first samples."""
    stats: Literal["data"] | UserPath | None = None
    """JSON file with statistics for `normalize`: lists `q01` and `q99`, or `mean` and `std`, with one number per action
    component (written by `wfm data stats`). `data`: compute the statistics from all actions of the training data."""
    normalize: Literal["none", "quantile", "meanstd"] = "none"
    """`quantile`: map q01 to -1 and q99 to 1. `meanstd`: subtract the mean and divide by std. Constant components
    become 0. The model and the rewards receive normalized actions."""
    compose: Literal["sum", "pose"] | None = None
    """How to combine the actions between two frames of a clip if `data.fps` is below the frame rate of the file. `sum`:
    add them. `pose`: chain the relative poses at the start of each action, which have 9 numbers each (translation and
    two columns of the rotation matrix); `rest` sets the numbers after them. Unset: such clips are invalid."""
    rest: Literal["first", "last"] = "first"
    """With `compose: pose`: use the numbers after the poses, such as the state of a gripper, of the first or the last
    of the combined actions."""

    @model_validator(mode="after")
    def _check_stats(self) -> ActionsRecipe:
        if (self.stats is None) != (self.normalize == "none"):
            raise ValueError("stats and normalize belong together: set both, or neither")
        if self.compose != "pose":
            self.require_defaults("rest", unless="compose: pose")
        if self.compose is not None and self.space is not None and not self.is_stored_space:
            raise ValueError("compose: only read for stored actions; poses are exact at any frame rate: remove it")
        return self

    @property
    def is_stored_space(self) -> bool:
        """Whether the actions are rows of one stored feature."""
        return isinstance(self.space, ActionSpaceRecipe) and self.space.feature is not None
