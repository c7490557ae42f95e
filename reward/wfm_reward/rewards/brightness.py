"""Rewards of the action quickstart: whether the brightness follows the actions, and a held-out reward."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, Score
from wfm_reward.brightness_demo import (
    FRAMES_PER_MOVE,
    MAX_START,
    MOVE_RAMP,
    NUM_MOVES,
    Frames,
    decode_moves,
    frame_brightness,
    measure_pixel_changes,
    render_frames,
    sample_moves,
)

MAX_RESIDUAL = 10.0  # upper bound of `residual`, in steps
NUM_CLIPS = 400
NEIGHBOURS = 5
MAX_NEIGHBOUR_DISTANCE = 0.15  # maximum RMS distance to a neighbour, with brightness in -1..1


class BrightnessFollowing(ItemReward):
    """Fraction of the requested brightness changes that the video shows, minus its distance from an ideal video.

    The distance is the mean absolute difference of the pixels from the nearest ideal video, in units of
    BRIGHTNESS_STEP. The reward also reports `following`, the fraction, and `residual`, the distance. `still` is the
    fraction over only those moves that request no change. It is missing if there are none.
    """

    name = primary_output = "brightness"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        "brightness": Range(-MAX_RESIDUAL, 1.0),
        "following": Range(0.0, 1.0),
        "residual": Range(0.0, MAX_RESIDUAL),
        "still": Range(0.0, 1.0),
    }
    required_inputs = ("actions",)

    def score_item(self, item: MediaItem) -> Score:
        try:
            target, changes = decode_moves(item.inputs["actions"]), measure_pixel_changes(item.frames)
        except ValueError as error:
            return item.fail(str(error))
        moves = np.rint(np.clip(changes[:, -1].mean(axis=1), -1, 1))
        right = moves == target
        residual = float(np.abs(changes - np.outer(moves, MOVE_RAMP)[..., None]).mean())
        parts = {"following": float(right.mean()), "residual": residual}
        if (target == 0).any():
            parts["still"] = float(right[target == 0].mean())
        return item.score(parts["following"] - residual, **parts)


class SeenAction(ItemReward):
    """Fraction of moves that a nearest-neighbour classifier, fitted on real clips, assigns to the requested action.

    A move counts as wrong if its nearest neighbour is farther away than MAX_NEIGHBOUR_DISTANCE.
    """

    name = primary_output = "seen_action"
    media_types = frozenset({"video"})
    outputs: ClassVar = {"seen_action": Range(0.0, 1.0)}
    required_inputs = ("actions",)

    def load(self) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        generator = np.random.Generator(np.random.PCG64(0))
        moves = np.stack([sample_moves(generator) for _ in range(NUM_CLIPS)])
        starts = generator.uniform(-MAX_START, MAX_START, NUM_CLIPS)
        clips = [render_frames(frame_brightness(*clip)) for clip in zip(starts, moves, strict=True)]
        features = np.concatenate([move_features(clip) for clip in clips])
        self._classifier: Any = KNeighborsClassifier(NEIGHBOURS).fit(features, moves.reshape(-1))

    def score_item(self, item: MediaItem) -> Score:
        try:
            target, _ = decode_moves(item.inputs["actions"]), measure_pixel_changes(item.frames)
        except ValueError as error:
            return item.fail(str(error))
        features = move_features(item.frames)
        distances, _ = self._classifier.kneighbors(features, 1)
        is_near = distances[:, 0] / features.shape[1] ** 0.5 < MAX_NEIGHBOUR_DISTANCE
        return item.score(float((is_near & (self._classifier.predict(features) == target)).mean()))


def move_features(frames: Frames) -> npt.NDArray[np.float32]:
    """Return features [2 moves, 5 * 8 * 16] of each move.

    They are the pixels of the frame before the move (-1 to 1), and the differences of the move's four frames from it.
    """
    grey = frames.mean(axis=3, dtype=np.float32).reshape(len(frames), -1) / 127.5 - 1
    before = grey[:-1:FRAMES_PER_MOVE, None]
    return np.concatenate([before, grey[1:].reshape(NUM_MOVES, FRAMES_PER_MOVE, -1) - before], axis=1).reshape(
        NUM_MOVES, -1
    )
