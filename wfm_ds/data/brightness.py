"""`python -m wfm_ds.data.brightness OUT_DIR`: the action quickstart's data, grey frames that actions brighten.

Half of the clips tell a wrong trajectory: what learns from them alone half listens, and reinforcement learning has
something to mend.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from wfm_ds.data.moving import FPS
from wfm_ds.data.written import require_new, write_video
from wfm_ds.program import program
from wfm_ds.seeds import derive_seed
from wfm_reward.brightness_world import STARTS, Frames, actions_of, draw_moves, levels_of, pixels

NUM_CLIPS, NUM_HELD_OUT = 2048, 256
WRONG = 0.5  # of the clips to learn from
PROMPT = json.dumps({"caption": "a grey wall"})  # a JSON object, as captions of actions are: taken as it is, so short
PROMPTS, START = "prompts.txt", "start.png"


def write_clip(folder: Path, number: int, *, wrong: float) -> Frames:
    """Write NNNN.mkv, .json and .actions.npy, and return the frames; with this probability the actions are others."""
    draw = np.random.Generator(np.random.PCG64(derive_seed(0, "brightness", folder.name, number)))
    moves, others = draw_moves(draw), draw_moves(draw)
    stem, frames = f"{number:04}", pixels(levels_of(draw.uniform(-STARTS, STARTS), moves))
    write_video(folder / f"{stem}.mkv", frames, FPS)
    np.save(folder / f"{stem}.actions.npy", actions_of(others if draw.random() < wrong else moves))
    (folder / f"{stem}.json").write_text(json.dumps({"prompt": PROMPT, "actions": f"{stem}.actions.npy"}) + "\n")
    return frames


def write_brightness(out: Path) -> int:
    """Write clips/NNNN.mkv with .json and .actions.npy (2048 clips, half of which tell a wrong trajectory), held_out/
    (256, all true), prompts.txt, and start.png, the first frame of the last of these; return the number of clips to
    learn from. The same bytes on every run with the same versions.

    Raises DataError if the folder exists and is not empty.
    """
    require_new(out)
    for name, count, wrong in (("clips", NUM_CLIPS, WRONG), ("held_out", NUM_HELD_OUT, 0.0)):
        (out / name).mkdir(parents=True)
        for number in range(1, count + 1):
            frames = write_clip(out / name, number, wrong=wrong)
    (out / PROMPTS).write_text(PROMPT + "\n")
    Image.fromarray(frames[0]).save(out / START)
    return NUM_CLIPS


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.data.brightness", description="Write the action quickstart's data.")
    p.add_argument("out_dir", type=Path, help="a new or empty folder; gets clips/ (SFT and RL) and held_out/")
    return p


def run(args: argparse.Namespace) -> None:
    count = write_brightness(args.out_dir)
    sys.stdout.write(f"{count} clips in {args.out_dir / 'clips'}, {NUM_HELD_OUT} in {args.out_dir / 'held_out'}\n")


if __name__ == "__main__":
    sys.exit(main())
