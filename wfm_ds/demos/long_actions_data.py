"""Data of the long-video demo: videos of a grey wall that actions brighten or darken over many clips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from wfm_ds.demos.actions_data import PROMPT, PROMPTS, START, write_files
from wfm_ds.demos.files import require_new_folder
from wfm_ds.seeds import derive_seed
from wfm_reward.brightness_demo import (
    FRAMES_PER_MOVE,
    MAX_START,
    NUM_MOVES,
    Frames,
    frame_brightness,
    render_frames,
    sample_walk,
)

NUM_CLIPS = 12  # of the held-out walks


@dataclass(frozen=True, slots=True)
class WalkSet:
    """Settings of the videos in one folder. Clips overlap by one frame, so a video has 1 + 8 * num_clips frames."""

    folder: str
    num_videos: int
    num_clips: int
    max_skipped: int = 0  # the first 0 to max_skipped clips of a walk are not in the video
    wrong: float = 0.0  # fraction of videos with actions that are unrelated to the video


WALK_SETS = (
    WalkSet("clips", 2048, 1, max_skipped=NUM_CLIPS - 1, wrong=0.5),  # SFT
    WalkSet("walks", 1024, 3, max_skipped=NUM_CLIPS - 1),  # RL
    WalkSet("held_out", 16, NUM_CLIPS),
)


def write_walk(folder: Path, number: int, settings: WalkSet) -> Frames:
    """Write NNNN.mkv, NNNN.json and NNNN.actions.npy, and return the frames [T,8,16,3].

    With probability `settings.wrong`, the stored actions belong to another walk with the same first frame.
    """
    generator = np.random.Generator(np.random.PCG64(derive_seed(0, "walk", settings.folder, number)))
    num_moves, start = NUM_MOVES * settings.num_clips, generator.uniform(-MAX_START, MAX_START)
    skipped = NUM_MOVES * int(generator.integers(settings.max_skipped + 1))
    moves = sample_walk(generator, start, skipped + num_moves)
    brightness = frame_brightness(start, moves)[FRAMES_PER_MOVE * skipped :]
    is_wrong = generator.random() < settings.wrong
    frames = render_frames(brightness)
    actions = sample_walk(generator, float(brightness[0]), num_moves) if is_wrong else moves[skipped:]
    write_files(folder, number, frames, actions)
    return frames


def write_walks(out: Path) -> int:
    """Write the demo data and return the number of videos for training. Raises DataError if `out` is not empty.

    * clips/: 2048 single clips for SFT. About half have wrong actions on purpose (those of another walk), so that the
      SFT model follows actions only partly, and RL can improve it.
    * walks/: 1024 videos of 3 clips for RL.
    * held_out/: 16 videos of 12 clips.
    * prompts.txt: the prompt.
    * start.png: the first frame of the last held-out video.
    """
    require_new_folder(out)
    for settings in WALK_SETS:
        (out / settings.folder).mkdir(parents=True)
        for number in range(1, settings.num_videos + 1):
            frames = write_walk(out / settings.folder, number, settings)
    (out / PROMPTS).write_text(PROMPT + "\n")
    Image.fromarray(frames[0]).save(out / START)
    return sum(settings.num_videos for settings in WALK_SETS[:-1])
