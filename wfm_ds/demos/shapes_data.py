"""`wfm data moving OUT_DIR`: write the moving-shapes demo of the video quickstart.

Each possible clip is written 20 times as a lossless video. 7 of its 20 captions name a wrong direction, so after SFT
the model often moves shapes in the wrong direction, and RL can improve it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from wfm_ds.demos.files import require_new_folder, write_video
from wfm_ds.program import run_command
from wfm_reward.moving_demo import DIRECTIONS, SHAPES, MovingClip, draw_clip, list_clips, render_frames

COPIES = 20
NUM_WRONG = 7  # of a clip's COPIES captions
FPS = 8


def caption_fields(clip: MovingClip) -> dict[str, str]:
    return {"prompt": clip.prompt, "shape": clip.shape, "direction": clip.direction}


def noisy_captions(clip: MovingClip) -> list[dict[str, str]]:
    """Return COPIES captions for a clip. The first NUM_WRONG captions name wrong directions."""
    other_directions = [direction for direction in DIRECTIONS if direction != clip.direction]
    wrong = [
        MovingClip(clip.shape, other_directions[k % len(other_directions)], clip.variant) for k in range(NUM_WRONG)
    ]
    return [caption_fields(variant) for variant in [*wrong, *[clip] * (COPIES - NUM_WRONG)]]


def write_moving(out: Path) -> int:
    """Write the demo and return the number of videos. Raises DataError if `out` is not empty.

    videos/: 960 videos NNNN.mkv with .json captions. prompts/train.jsonl: the 12 prompts.
    """
    require_new_folder(out)
    (out / "videos").mkdir(parents=True)
    (out / "prompts").mkdir()
    number = 0
    for clip in list_clips():
        for text in noisy_captions(clip):
            number += 1
            path = out / "videos" / f"{number:04}.mkv"
            write_video(path, render_frames(draw_clip(clip)), FPS)
            path.with_suffix(".json").write_text(json.dumps(text) + "\n")
    prompts = [caption_fields(MovingClip(shape, direction, 0)) for shape in SHAPES for direction in DIRECTIONS]
    (out / "prompts" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    return number


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm data moving", description="Write the data of the moving-shapes demo (video quickstart)."
    )
    p.add_argument("out_dir", type=Path, help="new or empty folder for videos/ (SFT) and prompts/ (RL)")
    return p


def run(args: argparse.Namespace) -> None:
    out = args.out_dir
    count = write_moving(out)
    sys.stdout.write(f"{count} captioned videos in {out / 'videos'}, 12 prompts in {out / 'prompts' / 'train.jsonl'}\n")
