"""The finite world of the action quickstart: a grey frame that every action brightens, darkens, or leaves as it is. The
data shows it, the rewards measure it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]
"""Brightness of frames, -1 black to 1 white."""
Frames = npt.NDArray[np.uint8]
"""[T,H,W,3]."""

NUM_FRAMES, HEIGHT, WIDTH = 5, 8, 16
NUM_ACTIONS = NUM_FRAMES - 1
STEP = 0.4  # of brightness
FARTHEST = 2  # steps from the start: a trajectory never leads to black or white
MOVES = (-1, 0, 1)  # steps: darker, as it is, brighter
STARTS = 0.2  # first frames have levels from -STARTS to STARTS, so that every trajectory stays in range


def draw_moves(draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return moves [4] that go no farther than FARTHEST from the start; all such trajectories are equally likely."""
    while True:
        moves: npt.NDArray[np.int64] = draw.choice(MOVES, size=NUM_ACTIONS)
        if np.abs(np.cumsum(moves)).max() <= FARTHEST:
            return moves


def levels_of(start: float, moves: npt.NDArray[np.int64]) -> Levels:
    """Return the levels [5] of the frames that these moves [4] lead through."""
    levels: Levels = (start + STEP * np.concatenate([[0], np.cumsum(moves)])).astype(np.float32)
    return levels


def pixels(levels: Levels) -> Frames:
    """Return levels [T] as grey frames [T,8,16,3]."""
    grey = np.rint((levels + 1) * 127.5).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (len(grey), HEIGHT, WIDTH, 3)).copy()


def actions_of(moves: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return moves [4] as actions [4,3]: three buttons, of which one is pressed."""
    return np.stack([moves == move for move in MOVES], axis=1).astype(np.float32)


def moves_of(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Undo `actions_of`. Raises ValueError for actions of another shape."""
    if actions.shape != (NUM_ACTIONS, len(MOVES)):
        raise ValueError(f"the actions are {list(actions.shape)}, not {[NUM_ACTIONS, len(MOVES)]}")
    moves: npt.NDArray[np.int64] = np.asarray(MOVES)[actions.argmax(axis=1)]
    return moves


def changes(frames: Frames) -> Levels:
    """Return the changes [4] of brightness from each frame [5,8,16,3] to the next, in steps. Raises ValueError for
    frames of another shape."""
    found: Levels = pixel_changes(frames).mean(axis=1)
    return found


def pixel_changes(frames: Frames) -> Levels:
    """Return the differences [4, 8 * 16 * 3] of each pixel from the mean of the frame before, in steps. Raises
    ValueError for frames of another shape than [5,8,16,3]."""
    if frames.shape != (NUM_FRAMES, HEIGHT, WIDTH, 3):
        raise ValueError(f"the video is {list(frames.shape)}, not {[NUM_FRAMES, HEIGHT, WIDTH, 3]}")
    levels = frames.reshape(NUM_FRAMES, -1).astype(np.float32) / 127.5 - 1
    found: Levels = (levels[1:] - levels[:-1].mean(axis=1, keepdims=True)) / STEP
    return found
