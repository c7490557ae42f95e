"""The finite world of the action quickstart: a grey frame that every press of a button brightens, darkens, or leaves as
it is. The data shows it, the rewards measure it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]
"""Brightness of frames, -1 black to 1 white."""
Frames = npt.NDArray[np.uint8]
"""[T,H,W,3]."""

NUM_MOVES, HELD = 2, 4  # presses of a button, and the frames for which each is held: those of a latent frame
NUM_FRAMES, HEIGHT, WIDTH = 1 + NUM_MOVES * HELD, 8, 16
STEP = 0.4  # of brightness, in a whole move
MOVES = (-1, 0, 1)  # steps: darker, as it is, brighter
STARTS = 0.2  # first frames have levels from -STARTS to STARTS: no trajectory goes beyond black or white
RAMP = np.arange(1, HELD + 1, dtype=np.float32) / HELD  # share of a move that is done by each of its frames


def draw_moves(draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return moves [2]; all are equally likely."""
    moves: npt.NDArray[np.int64] = draw.choice(MOVES, size=NUM_MOVES)
    return moves


def levels_of(start: float, moves: npt.NDArray[np.int64]) -> Levels:
    """Return the levels [9] of the frames that these moves [2] lead through."""
    levels: Levels = (start + STEP * np.concatenate([[0], np.cumsum(np.repeat(moves, HELD)) / HELD])).astype(np.float32)
    return levels


def pixels(levels: Levels) -> Frames:
    """Return levels [T] as grey frames [T,8,16,3]."""
    grey = np.rint((levels + 1) * 127.5).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (len(grey), HEIGHT, WIDTH, 3)).copy()


def actions_of(moves: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return moves [2] as actions [8,3]: three buttons, of which one is held for four frames."""
    held = np.repeat(moves, HELD)
    return np.stack([held == move for move in MOVES], axis=1).astype(np.float32)


def moves_of(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Undo `actions_of`. Raises ValueError for actions of another shape."""
    if actions.shape != (NUM_MOVES * HELD, len(MOVES)):
        raise ValueError(f"the actions are {list(actions.shape)}, not {[NUM_MOVES * HELD, len(MOVES)]}")
    moves: npt.NDArray[np.int64] = np.asarray(MOVES)[actions[::HELD].argmax(axis=1)]
    return moves


def changes(frames: Frames) -> Levels:
    """Return the changes [2] of brightness over each move of frames [9,8,16,3], in steps. Raises ValueError for frames
    of another shape."""
    found: Levels = pixel_changes(frames)[:, -1].mean(axis=1)
    return found


def pixel_changes(frames: Frames) -> Levels:
    """Return the differences [2, 4, 8 * 16 * 3] of each pixel of a move's frames from the mean of the frame before the
    move, in steps. Raises ValueError for frames of another shape than [9,8,16,3]."""
    if frames.shape != (NUM_FRAMES, HEIGHT, WIDTH, 3):
        raise ValueError(f"the video is {list(frames.shape)}, not {[NUM_FRAMES, HEIGHT, WIDTH, 3]}")
    levels = frames.reshape(NUM_FRAMES, -1).astype(np.float32) / 127.5 - 1
    before = levels[:-1:HELD].mean(axis=1)[:, None, None]
    found: Levels = (levels[1:].reshape(NUM_MOVES, HELD, -1) - before) / STEP
    return found
