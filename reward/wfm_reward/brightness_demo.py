"""Demo of the action quickstart: each move makes grey frames brighter or darker, or leaves them unchanged."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FrameBrightness = npt.NDArray[np.float32]
"""Brightness of each frame, from -1 (black) to 1 (white)."""
Frames = npt.NDArray[np.uint8]
"""RGB frames [T,H,W,3]."""

NUM_MOVES, FRAMES_PER_MOVE = 2, 4  # 4 frames: one latent frame
NUM_FRAMES, HEIGHT, WIDTH = 1 + NUM_MOVES * FRAMES_PER_MOVE, 8, 16
BRIGHTNESS_STEP = 0.4  # brightness change of a completed move
MOVES = (-1, 0, 1)  # darker, unchanged, brighter; in units of BRIGHTNESS_STEP
MAX_START = 0.2  # brightness of first frames is in -0.2..0.2, so that no clip exceeds black or white
TOLERANCE = 1e-6  # how far sums of moves may exceed black or white because of rounding
# completed fraction of a move at each of its frames
MOVE_RAMP = np.arange(1, FRAMES_PER_MOVE + 1, dtype=np.float32) / FRAMES_PER_MOVE


def sample_moves(generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the two moves [2] of a clip. All MOVES are equally likely."""
    moves: npt.NDArray[np.int64] = generator.choice(MOVES, size=NUM_MOVES)
    return moves


def sample_walk(generator: np.random.Generator, start: float, num_moves: int) -> npt.NDArray[np.int64]:
    """Draw the moves [num_moves] of a walk that stays within black and white.

    start: brightness of the first frame.
    """
    moves, brightness = np.zeros(num_moves, np.int64), start
    for i in range(num_moves):
        possible = [move for move in MOVES if abs(brightness + move * BRIGHTNESS_STEP) <= 1 + TOLERANCE]
        moves[i] = generator.choice(possible)
        brightness += moves[i] * BRIGHTNESS_STEP
    return moves


def frame_brightness(start: float, moves: npt.NDArray[np.int64]) -> FrameBrightness:
    """Return the brightness of the frames of a video, [1 + 4 * number of moves].

    start: brightness of the first frame. moves: moves of the video, [number of moves].
    """
    levels: FrameBrightness = (
        start + BRIGHTNESS_STEP * np.concatenate([[0], np.cumsum(np.repeat(moves, FRAMES_PER_MOVE)) / FRAMES_PER_MOVE])
    ).astype(np.float32)
    return levels


def render_frames(brightness: FrameBrightness) -> Frames:
    """Render T brightness values [T] as uniform grey frames [T,8,16,3]."""
    grey = np.rint((brightness + 1) * 127.5).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (len(grey), HEIGHT, WIDTH, 3)).copy()


def encode_actions(moves: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Encode moves [number of moves] as actions [4 * number of moves, 3]: four one-hot actions over MOVES per move."""
    frame_moves = np.repeat(moves, FRAMES_PER_MOVE)
    return np.stack([frame_moves == move for move in MOVES], axis=1).astype(np.float32)


def decode_moves(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Decode actions [8,3] to moves [2]. Raises ValueError for other shapes."""
    if actions.shape != (NUM_MOVES * FRAMES_PER_MOVE, len(MOVES)):
        raise ValueError(
            f"the actions have shape {list(actions.shape)}, not {[NUM_MOVES * FRAMES_PER_MOVE, len(MOVES)]}"
        )
    moves: npt.NDArray[np.int64] = np.asarray(MOVES)[actions[::FRAMES_PER_MOVE].argmax(axis=1)]
    return moves


def measure_pixel_changes(frames: Frames) -> FrameBrightness:
    """Return the pixel changes [2 moves, 4 frames, 8 * 16 * 3 pixels], in units of BRIGHTNESS_STEP.

    A pixel change is the pixel minus the mean of the frame before the move. Raises ValueError unless the frames have
    shape [9,8,16,3].
    """
    if frames.shape != (NUM_FRAMES, HEIGHT, WIDTH, 3):
        raise ValueError(f"the video has shape {list(frames.shape)}, not {[NUM_FRAMES, HEIGHT, WIDTH, 3]}")
    levels = frames.reshape(NUM_FRAMES, -1).astype(np.float32) / 127.5 - 1
    before = levels[:-1:FRAMES_PER_MOVE].mean(axis=1)[:, None, None]
    changes_in_steps: FrameBrightness = (levels[1:].reshape(NUM_MOVES, FRAMES_PER_MOVE, -1) - before) / BRIGHTNESS_STEP
    return changes_in_steps
