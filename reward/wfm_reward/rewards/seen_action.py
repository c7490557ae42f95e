"""The action quickstart's judge, which RL never sees: inverse dynamics, learnt from true clips."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, Score
from wfm_reward.brightness_world import (
    HELD,
    NUM_MOVES,
    STARTS,
    Frames,
    changes,
    draw_moves,
    levels_of,
    moves_of,
    pixels,
)

NUM_CLIPS = 400
NEIGHBOURS = 5
NEAR = 0.15  # root of the mean square of the difference, of brightness in -1..1


class SeenAction(Reward):
    """Share of the presses that a classifier reads from the pixels of the five frames that each leads through.

    It has the NEIGHBOURS nearest presses of true clips vote, and reads nothing where even the nearest is more
    than NEAR away. The reward measures changes; this asks what true clips look like.
    """

    name = "seen_action"
    media = frozenset({"video"})
    outputs: ClassVar = {"seen_action": Range(0.0, 1.0)}
    primary = "seen_action"
    needs_inputs = ("actions",)

    def load(self) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        draw = np.random.Generator(np.random.PCG64(0))
        moves = np.stack([draw_moves(draw) for _ in range(NUM_CLIPS)])
        starts = draw.uniform(-STARTS, STARTS, NUM_CLIPS)
        clips = [pixels(levels_of(start, one)) for start, one in zip(starts, moves, strict=True)]
        seen = np.concatenate([passages(clip) for clip in clips])
        self._judge: Any = KNeighborsClassifier(NEIGHBOURS).fit(seen, moves.reshape(-1))

    def score(self, batch: MediaBatch) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: MediaItem) -> Score:
        try:
            wanted, _ = moves_of(item.inputs["actions"]), changes(item.frames)
        except ValueError as error:
            return item.failed(str(error))
        seen = passages(item.frames)
        distances, _ = self._judge.kneighbors(seen, 1)
        is_read = distances[:, 0] / seen.shape[1] ** 0.5 < NEAR
        return item.scored(float((is_read & (self._judge.predict(seen) == wanted)).mean()))


def passages(frames: Frames) -> npt.NDArray[np.float32]:
    """Return the frame before each move and the changes from it to the move's own, [2, 5 * 8 * 16], grey, white 1."""
    grey = frames.mean(axis=3, dtype=np.float32).reshape(len(frames), -1) / 127.5 - 1
    before = grey[:-1:HELD, None]
    return np.concatenate([before, grey[1:].reshape(NUM_MOVES, HELD, -1) - before], axis=1).reshape(NUM_MOVES, -1)
