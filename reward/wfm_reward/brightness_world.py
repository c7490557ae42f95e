"""Demo of the action quickstart: a grey frame that each move brightens, darkens or leaves unchanged.

The data generator renders these frames and the rewards measure them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]
"""Brightness per frame, from -1 (black) to 1 (white)."""
Frames = npt.NDArray[np.uint8]
"""[T,H,W,3]."""

NUM_MOVES, HELD = 2, 4  # moves per clip; frames per move (one latent frame)
NUM_FRAMES, HEIGHT, WIDTH = 1 + NUM_MOVES * HELD, 8, 16
STEP = 0.4  # brightness change of a complete move
MOVES = (-1, 0, 1)  # in steps: darker, unchanged, brighter
STARTS = 0.2  # first frames have brightness -0.2 to 0.2, so that no clip exceeds black or white
RAMP = np.arange(1, HELD + 1, dtype=np.float32) / HELD  # completed fraction of a move at each of its frames


def draw_moves(draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """Sample moves [2] uniformly."""
    moves: npt.NDArray[np.int64] = draw.choice(MOVES, size=NUM_MOVES)
    return moves


def levels_of(start: float, moves: npt.NDArray[np.int64]) -> Levels:
    """Return the brightness [9] of each frame, given the start and the moves [2]."""
    levels: Levels = (start + STEP * np.concatenate([[0], np.cumsum(np.repeat(moves, HELD)) / HELD])).astype(np.float32)
    return levels


def pixels(levels: Levels) -> Frames:
    """Render brightness [T] as grey frames [T,8,16,3]."""
    grey = np.rint((levels + 1) * 127.5).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (len(grey), HEIGHT, WIDTH, 3)).copy()


def actions_of(moves: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Encode moves [2] as actions [8,3]: one-hot over three buttons, held for four frames."""
    frame_moves = np.repeat(moves, HELD)
    return np.stack([frame_moves == move for move in MOVES], axis=1).astype(np.float32)


def moves_of(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Decode actions [8,3] to moves [2]. Raises ValueError for other shapes."""
    if actions.shape != (NUM_MOVES * HELD, len(MOVES)):
        raise ValueError(f"the actions have shape {list(actions.shape)}, not {[NUM_MOVES * HELD, len(MOVES)]}")
    moves: npt.NDArray[np.int64] = np.asarray(MOVES)[actions[::HELD].argmax(axis=1)]
    return moves


def changes(frames: Frames) -> Levels:
    """Measure the brightness change [2] of each move in frames [9,8,16,3], in steps. Raises ValueError for other
    shapes.
    """
    moves: Levels = pixel_changes(frames)[:, -1].mean(axis=1)
    return moves


def pixel_changes(frames: Frames) -> Levels:
    """Measure pixel changes [2, 4, 8 * 16 * 3] in steps: each pixel of a move's four frames minus the mean brightness
    of the frame before the move. Raises ValueError unless the frames have shape [9,8,16,3]."""
    if frames.shape != (NUM_FRAMES, HEIGHT, WIDTH, 3):
        raise ValueError(f"the video has shape {list(frames.shape)}, not {[NUM_FRAMES, HEIGHT, WIDTH, 3]}")
    levels = frames.reshape(NUM_FRAMES, -1).astype(np.float32) / 127.5 - 1
    before = levels[:-1:HELD].mean(axis=1)[:, None, None]
    changes_in_steps: Levels = (levels[1:].reshape(NUM_MOVES, HELD, -1) - before) / STEP
    return changes_in_steps
