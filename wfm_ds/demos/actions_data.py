"""`wfm data brightness OUT_DIR`: write the brightness demo, grey clips that actions brighten or darken."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.demos.files import data_parser, require_new_folder, write_json_rows, write_video
from wfm_ds.demos.shapes_data import FPS
from wfm_ds.seeds import derive_seed
from wfm_reward.brightness_demo import MAX_START, Frames, encode_actions, frame_brightness, render_frames, sample_moves

NUM_CLIPS, NUM_HELD_OUT = 2048, 256
WRONG_FRACTION = 0.5  # fraction of training clips with unrelated actions
PROMPT = json.dumps({"caption": "a grey wall"})  # action models use JSON captions without further templates
PROMPTS, START = "prompts.txt", "start.png"


def write_clip(folder: Path, number: int, *, wrong: float) -> Frames:
    """Write NNNN.mkv, NNNN.json and NNNN.actions.npy, and return the frames [T,H,W,3].

    wrong: probability that random actions are stored instead of the actions that made the frames.
    """
    generator = np.random.Generator(np.random.PCG64(derive_seed(0, "brightness", folder.name, number)))
    moves, wrong_moves = sample_moves(generator), sample_moves(generator)
    frames = render_frames(frame_brightness(generator.uniform(-MAX_START, MAX_START), moves))
    write_files(folder, number, frames, wrong_moves if generator.random() < wrong else moves)
    return frames


def write_files(folder: Path, number: int, frames: Frames, moves: npt.NDArray[np.int64]) -> None:
    """Write NNNN.mkv, NNNN.actions.npy and NNNN.json with the prompt.

    frames: [T,8,16,3]. moves: [number of moves], the actions.
    """
    stem = f"{number:04}"
    write_video(folder / f"{stem}.mkv", frames, FPS)
    np.save(folder / f"{stem}.actions.npy", encode_actions(moves))
    write_json_rows(folder / f"{stem}.json", [{"prompt": PROMPT, "actions": f"{stem}.actions.npy"}])


def write_brightness(out: Path) -> int:
    """Write the demo data and return the number of training clips. Raises DataError if `out` is not empty.

    * clips/: 2048 clips NNNN.mkv with .json and .actions.npy. About half have wrong (random) actions on purpose, so
      that the SFT model follows actions only partly, and RL can improve it.
    * held_out/: 256 clips with correct actions.
    * prompts.txt: the prompt.
    * start.png: the first frame of the last held-out clip.
    """
    require_new_folder(out)
    for name, count, wrong in (("clips", NUM_CLIPS, WRONG_FRACTION), ("held_out", NUM_HELD_OUT, 0.0)):
        (out / name).mkdir(parents=True)
        for number in range(1, count + 1):
            frames = write_clip(out / name, number, wrong=wrong)
    (out / PROMPTS).write_text(PROMPT + "\n")
    Image.fromarray(frames[0]).save(out / START)
    return NUM_CLIPS


parser = partial(
    data_parser,
    "Write the data of the brightness demo (action quickstart).",
    "new or empty folder for clips/ (SFT and RL) and held_out/",
)


def run(args: argparse.Namespace) -> None:
    count = write_brightness(args.out_dir)
    sys.stdout.write(f"{count} clips in {args.out_dir / 'clips'}, {NUM_HELD_OUT} in {args.out_dir / 'held_out'}\n")
