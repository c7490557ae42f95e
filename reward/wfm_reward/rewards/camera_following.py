"""Does the camera go where it was told? The poses of a video's frames, from a service, against those of the path."""

from __future__ import annotations

import http.client
import io
import json
import urllib.request
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, RewardError, Score

Poses = npt.NDArray[np.float64]
RIGID = 1e-2  # to which an estimated rotation must be orthonormal
STILL = 1e-6  # of a path's length: below it no direction is defined


class CameraFollowing(Reward):
    """Mean of two parts in 0..1, from camera poses [F,4,4] of a service, camera to world with OpenCV axes.

    `rotation`: exp(-mean angle / `degrees`) between the turns of the camera since the first frame, seen and told.
    `direction`: (1 + mean cosine) / 2 between its ways since then: the scale of a scene cannot be seen. Where the path
    stands still there is none, and rotation counts alone. Part `degrees`: the mean angle.

    The service gets POST `url`, the frames uint8 [F,H,W,3] as an .npy file, and answers with JSON: {"c2w": [F,4,4]}.
    """

    name = "camera_following"
    media = frozenset({"video"})
    outputs: ClassVar = {
        **dict.fromkeys(("camera_following", "rotation", "direction"), Range(0.0, 1.0)),
        "degrees": Range(0.0, 180.0),
    }
    primary = "camera_following"
    needs_inputs = ("c2w",)
    stall_s = 660.0

    def __init__(self, device: str = "cpu", *, url: str = "", degrees: float = 10.0, timeout_s: float = 120.0) -> None:
        """`url`: of the service; `degrees`: the error in rotation at which its part is 1/e. Raises RewardError for
        others."""
        super().__init__(device)
        if not url.startswith(("http://", "https://")) or not degrees > 0:
            raise RewardError(f"reward {self.name}: url {url!r} must be an address, and degrees {degrees} above 0")
        self.url, self.degrees, self.timeout_s = url, degrees, timeout_s

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        wanted = item.inputs["c2w"].astype(np.float64)
        try:
            seen = self._poses(item)
        except RewardError as error:
            return item.failed(str(error))
        if seen.shape != wanted.shape or not np.isfinite(seen).all():
            return item.failed(f"the pose service returned {list(seen.shape)} for a path {list(wanted.shape)}")
        if not is_rigid(seen):
            return item.failed("the pose service returned a pose whose 3 x 3 part is no rotation")
        return item.scored(**following(seen, wanted, self.degrees))

    def _poses(self, item: MediaItem) -> Poses:
        """Raises RewardError where the service does not answer with poses."""
        body = io.BytesIO()
        np.save(body, item.frames)
        asked = urllib.request.Request(
            self.url, body.getvalue(), {"Content-Type": "application/octet-stream"}, method="POST"
        )
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout_s) as answer:
                found: Poses = np.asarray(json.load(answer)["c2w"], np.float64)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise RewardError(f"the pose service at {self.url} did not answer with poses: {error}") from error
        return found


def following(seen: Poses, wanted: Poses, degrees: float) -> dict[str, float]:
    """Return `value` and the parts of poses [F,4,4] that were seen where others were wanted."""
    ours, theirs = since_first(seen), since_first(wanted)
    turns = np.einsum("fji,fjk->fik", ours[1:, :3, :3], theirs[1:, :3, :3])
    cosines = (np.trace(turns, axis1=1, axis2=2) - 1) / 2
    angle = float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).mean())
    parts = {"rotation": float(np.exp(-angle / degrees)), "degrees": angle}
    ways, told = ours[1:, :3, 3], theirs[1:, :3, 3]
    lengths = np.linalg.norm(told, axis=1)
    moving = lengths > STILL
    if moving.any():
        products = (ways * told).sum(axis=1)[moving]
        scale = np.maximum(np.linalg.norm(ways, axis=1)[moving] * lengths[moving], STILL**2)
        parts["direction"] = float((1 + np.clip(products / scale, -1, 1).mean()) / 2)
    judged = [parts[name] for name in ("rotation", "direction") if name in parts]
    return {"value": float(np.mean(judged)), **parts}


def is_rigid(poses: Poses) -> bool:
    """Return whether the 3 x 3 part of each pose [F,4,4] is orthonormal to RIGID, with determinant 1."""
    turns = poses[:, :3, :3]
    products = np.einsum("fji,fjk->fik", turns, turns)
    return bool((np.abs(products - np.eye(3)) <= RIGID).all() and (np.linalg.det(turns) > 0).all())


def since_first(poses: Poses) -> Poses:
    """Return the poses in the frame of the first one."""
    found: Poses = np.linalg.inv(poses[0]) @ poses
    return found
