"""Clips with control videos, for tiny recipes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from wfm_ds.demos.files import write_video
from wfm_ds.demos.shapes_data import FPS
from wfm_reward.moving_demo import NUM_VARIANTS, draw_clip, list_clips, render_frames


def write_controls(out: Path) -> int:
    """Write the clips of the moving-shapes demo with control videos, and return the number of clips.

    Videos with equal names in the folders target, control (a square in the position of the shape) and control_mask (the
    path of the square) belong together. The folders target and control have captions. pairs.jsonl has preference pairs;
    the rejected clip has another caption.
    """
    clips, pairs = list_clips(), []
    for number, clip in enumerate(clips, 1):
        square = draw_clip(replace(clip, shape="square"))
        path = np.broadcast_to(square.max(axis=0), square.shape)
        for name, cells in (("target", draw_clip(clip)), ("control", square), ("control_mask", path)):
            file = out / name / f"{number:02}.mkv"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_video(file, render_frames(cells), FPS)
            if name != "control_mask":
                file.with_suffix(".txt").write_text(clip.prompt + "\n")
        files = {name: f"{name}/{number:02}.mkv" for name in ("control", "control_mask")}
        rejected = (number - 1 + NUM_VARIANTS) % len(clips) + 1
        pair = {"prompt": clip.prompt, "chosen": f"target/{number:02}.mkv", "rejected": f"target/{rejected:02}.mkv"}
        pairs.append(json.dumps(pair | files) + "\n")
    (out / "pairs.jsonl").write_text("".join(pairs))
    return len(clips)
