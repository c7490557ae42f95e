"""`wfm data moving OUT_DIR`: write the moving-shapes demo of the video quickstart.

Three of the twelve (shape, direction) pairs are held out. Each clip of the other pairs is written 20 times, and 7 of
the 20 captions name a wrong direction, so that RL can improve the model after SFT.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from wfm_ds.demos.files import data_parser, require_new_folder, write_json_rows, write_video
from wfm_reward.moving_demo import DIRECTIONS, SHAPES, MovingClip, draw_clip, list_clips, render_frames

PAIRS = [(shape, direction) for shape in SHAPES for direction in DIRECTIONS]
# One pair of each shape, each with a different direction, so that training shows every shape and every direction.
HELD_OUT_PAIRS = [("square", "left"), ("circle", "down"), ("triangle", "right")]
TRAINED_PAIRS = [pair for pair in PAIRS if pair not in HELD_OUT_PAIRS]
HELD_OUT_PROMPTS = [MovingClip(*pair, 0).prompt for pair in HELD_OUT_PAIRS]
COPIES = 20
NUM_WRONG = 7  # of a clip's COPIES captions
FPS = 8


def caption_fields(clip: MovingClip) -> dict[str, str]:
    return {"prompt": clip.prompt, "shape": clip.shape, "direction": clip.direction}


def noisy_captions(clip: MovingClip) -> list[dict[str, str]]:
    others = [pair for pair in TRAINED_PAIRS if pair[0] == clip.shape and pair[1] != clip.direction]
    wrong = [MovingClip(*others[k % len(others)], clip.variant) for k in range(NUM_WRONG)]
    return [caption_fields(variant) for variant in [*wrong, *[clip] * (COPIES - NUM_WRONG)]]


def write_moving(out: Path) -> int:
    """Write the demo data and return the number of videos. Raises DataError if `out` is not empty.

    * videos/: 720 lossless videos NNNN.mkv with .json captions.
    * prompts/train.jsonl: the 9 prompts of the TRAINED_PAIRS.
    * prompts/validation.jsonl: the prompts of train.jsonl, then the 3 prompts of the HELD_OUT_PAIRS.
    """
    require_new_folder(out)
    (out / "videos").mkdir(parents=True)
    (out / "prompts").mkdir()
    number = 0
    for clip in list_clips():
        if (clip.shape, clip.direction) in HELD_OUT_PAIRS:
            continue
        for text in noisy_captions(clip):
            number += 1
            path = out / "videos" / f"{number:04}.mkv"
            write_video(path, render_frames(draw_clip(clip)), FPS)
            write_json_rows(path.with_suffix(".json"), [text])
    for split, pairs in (("train", TRAINED_PAIRS), ("validation", TRAINED_PAIRS + HELD_OUT_PAIRS)):
        write_json_rows(out / "prompts" / f"{split}.jsonl", (caption_fields(MovingClip(*pair, 0)) for pair in pairs))
    return number


parser = partial(
    data_parser,
    "Write the data of the moving-shapes demo (video quickstart).",
    "new or empty folder for videos/ (SFT) and prompts/ (RL)",
)


def run(args: argparse.Namespace) -> None:
    out = args.out_dir
    count = write_moving(out)
    prompts = f"{len(TRAINED_PAIRS)} training prompts and {len(PAIRS)} validation prompts in {out / 'prompts'}"
    sys.stdout.write(f"{count} captioned videos in {out / 'videos'}, {prompts}\n")
