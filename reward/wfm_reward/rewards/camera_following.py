"""Camera following: compare the estimated camera poses of a video with the camera path of its conditioning."""

from __future__ import annotations

import http.client
import io
import json
import time
import urllib.request
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score
from wfm_reward.http_client import check_reply

Poses = npt.NDArray[np.float64]
ROTATION_TOLERANCE = 1e-2  # tolerance for the orthonormality of estimated rotations
MIN_LENGTH = 1e-6  # of a translation; shorter ones have no direction


class CameraFollowing(ItemReward):
    """Agreement between the estimated camera poses of a video and the conditioning poses, 0 to 1.

    The score is the mean of the parts `rotation` and `direction`. `rotation` is exp(-angle / d), where `angle` is the
    mean angle between the rotations and d the option `degrees`. `direction` is (1 + c) / 2, where c is the mean cosine
    between the translations; it is omitted if the camera path does not move. The part `degrees` is `angle`. All poses
    are relative to the first frame.

    A pose service estimates the poses as camera-to-world matrices [F,4,4] with OpenCV axes. It receives POST `url` with
    the frames uint8 [F,H,W,3] as an .npy file, and replies with JSON: {"c2w": [F,4,4]}.
    """

    name = primary_output = "camera_following"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        **dict.fromkeys(("camera_following", "rotation", "direction"), Range(0.0, 1.0)),
        "degrees": Range(0.0, 180.0),
    }
    required_inputs = ("c2w",)
    stall_s = 660.0

    def __init__(self, device: str = "cpu", *, url: str = "", degrees: float = 10.0, timeout_s: float = 120.0) -> None:
        """url: address of the pose service. degrees: mean rotation error at which the part `rotation` is 1/e.

        Raises RewardError if an option is invalid.
        """
        super().__init__(device)
        if not url.startswith(("http://", "https://")) or not degrees > 0:
            raise RewardError(f"reward {self.name}: url {url!r} must be an HTTP address, and degrees {degrees} > 0")
        self.url, self.degrees, self.timeout_s = url, degrees, timeout_s

    def check_reachable(self) -> None:
        check_reply(self.url, f"reward {self.name}")

    def score_item(self, item: MediaItem) -> Score:
        target = item.inputs["c2w"].astype(np.float64)
        try:
            estimated = self._request_poses(item)
        except RewardError as error:
            return item.fail(str(error))
        if estimated.shape != target.shape or not np.isfinite(estimated).all():
            return item.fail(f"the pose service returned {list(estimated.shape)} for a path {list(target.shape)}")
        if not is_rigid(estimated):
            return item.fail("the pose service returned a pose with an invalid rotation matrix")
        return item.score(**camera_scores(estimated, target, self.degrees))

    def _request_poses(self, item: MediaItem) -> Poses:
        body = io.BytesIO()
        np.save(body, item.frames)
        request = urllib.request.Request(
            self.url, body.getvalue(), {"Content-Type": "application/octet-stream"}, method="POST"
        )
        timeout_s = min(self.timeout_s, self.deadline_s - time.monotonic())
        if timeout_s <= 0:
            raise RewardError(f"no time is left in this batch to ask the pose service at {self.url}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                poses: Poses = np.asarray(json.load(response)["c2w"], np.float64)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RewardError(f"the pose service at {self.url} did not return poses: {error}") from error
        return poses


def camera_scores(estimated: Poses, target: Poses, degrees: float) -> dict[str, float]:
    """Compare estimated and target poses [F,4,4].

    Returns {"value", "rotation", "degrees"}, and "direction" if the target path moves.
    """
    poses, target_poses = relative_to_first(estimated), relative_to_first(target)
    turns = np.einsum("fji,fjk->fik", poses[1:, :3, :3], target_poses[1:, :3, :3])
    cosines = (np.trace(turns, axis1=1, axis2=2) - 1) / 2
    angle = float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).mean())
    parts = {"rotation": float(np.exp(-angle / degrees)), "degrees": angle}
    translations, target_translations = poses[1:, :3, 3], target_poses[1:, :3, 3]
    lengths = np.linalg.norm(target_translations, axis=1)
    moving = lengths > MIN_LENGTH
    if moving.any():
        products = (translations * target_translations).sum(axis=1)[moving]
        scale = np.maximum(np.linalg.norm(translations, axis=1)[moving] * lengths[moving], MIN_LENGTH**2)
        parts["direction"] = float((1 + np.clip(products / scale, -1, 1).mean()) / 2)
    values = [parts[name] for name in ("rotation", "direction") if name in parts]
    return {"value": float(np.mean(values)), **parts}


def is_rigid(poses: Poses) -> bool:
    """Return whether the 3 x 3 part of each pose [F,4,4] is a rotation, within ROTATION_TOLERANCE."""
    turns = poses[:, :3, :3]
    products = np.einsum("fji,fjk->fik", turns, turns)
    return bool((np.abs(products - np.eye(3)) <= ROTATION_TOLERANCE).all() and (np.linalg.det(turns) > 0).all())


def relative_to_first(poses: Poses) -> Poses:
    """Return the poses [F,4,4] relative to the first pose."""
    relative: Poses = np.linalg.inv(poses[0]) @ poses
    return relative
