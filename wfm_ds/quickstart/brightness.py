"""The quickstart's world of actions: a grey wall that becomes brighter and darker when it is told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from wfm_ds.data.brightness import NUM_HELD_OUT, PROMPTS, START, write_brightness
from wfm_ds.quickstart.moving import load_video
from wfm_ds.quickstart.world import World, evaluations, table
from wfm_reward.brightness_world import HEIGHT, NUM_FRAMES, WIDTH

REWARD = "val/reward/brightness"
JUDGE = "val/judge/seen_action/mean"
METRICS: Mapping[str, str] = {
    "actions followed (chance .33)": f"{REWARD}/following/mean",
    "- of those that change nothing": f"{REWARD}/still/mean",
    "distance of the pixels from the nearest move, in steps": f"{REWARD}/residual/mean",
    "judge (inverse dynamics that RL never sees)": JUDGE,
}
NUM_SHOWN = 12
SCALE = 3


class Brightness(World):
    """A wall that brightens and darkens."""

    name = "world"
    what = "a grey wall that follows actions"
    media = "clips"
    asked = "clips"
    output = Path("outputs/quickstart-world")

    def write(self, out: Path) -> int:
        return write_brightness(out)

    def sft_overrides(self, folder: Path) -> list[str]:
        return [f"data.cache_dir={folder / 'cache'}", *self.rl_overrides(folder)]

    def rl_overrides(self, folder: Path) -> list[str]:
        return [f"validation.path={folder / 'data' / 'held_out'}"]

    def show(self, folder: Path, run: Path) -> list[str]:
        found = evaluations(run, f"{REWARD}/mean")
        for (samples, _), name in ((found[0], "before"), (found[-1], "after")):
            write_pairs(folder / f"{name}.png", samples, folder / "data" / "held_out")
        before, after = found[0][1], found[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items()]
        pictures = (
            f"Pictures: {folder / 'before.png'} and {folder / 'after.png'}: above what the actions ask for, below what "
            "was drawn, from the same first frame."
        )
        return [*table("on held-out starts with actions of their own", rows), "", pictures]

    def more(self, folder: Path) -> str:
        data = folder / "data"
        actions = data / "held_out" / f"{NUM_HELD_OUT:04}.actions.npy"
        return (
            f"--prompts {data / PROMPTS} --height {HEIGHT} --width {WIDTH} --frames {NUM_FRAMES} --fps 8 --steps 8 "
            f"--guardrail off --first-frame {data / START} --actions {actions} "
            f"--seeds 1 2 3 4 --batch 4 --out {folder / 'more'}"
        )


def write_pairs(path: Path, samples: Path, clips: Path) -> None:
    """The first videos of an evaluation, frame by frame: above each the clip whose actions it was told."""
    from wfm_ds.monitoring.pictures import grid, save_png

    entries = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()][:NUM_SHOWN]
    rows = [video for e in entries for video in (clips / f"{e['prompt_id']}.mkv", samples / e["file"])]
    frames = [frame for video in rows for frame in load_video(video)]
    save_png(path, grid(frames, NUM_FRAMES, scale=SCALE))
