"""The actions demo: videos of a grey wall that actions brighten or darken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from wfm_ds.demos.actions_data import NUM_HELD_OUT, PROMPTS, START, write_brightness
from wfm_ds.demos.base import Demo, comparison_table, load_evaluations
from wfm_ds.demos.shapes import load_video
from wfm_ds.storage.json_lines import read_json_rows
from wfm_reward.brightness_demo import HEIGHT, NUM_FRAMES, WIDTH

REWARD = "val/reward/brightness"
JUDGE = "val/held_out/seen_action/mean"
METRICS: Mapping[str, str] = {
    "actions followed (chance .33)": f"{REWARD}/following/mean",
    "- actions without a change": f"{REWARD}/still/mean",
    "distance of the pixels from the nearest move, in steps": f"{REWARD}/residual/mean",
    "held-out reward (inverse dynamics)": JUDGE,
}
NUM_SHOWN = 12
SCALE = 3


class ActionsDemo(Demo):
    name = "world"
    description = "a grey wall that follows actions"
    sft_data = "clips"
    rl_data = "clips"
    output = Path("outputs/quickstart-world")
    write_data = staticmethod(write_brightness)
    curves: ClassVar = {"actions followed": f"{REWARD}/following/mean", "held-out reward (inverse dynamics)": JUDGE}

    def sft_overrides(self, folder: Path) -> list[str]:
        return [f"data.cache_dir={folder / 'cache'}", *self.rl_overrides(folder)]

    def rl_overrides(self, folder: Path) -> list[str]:
        return [f"validation.path={folder / 'data' / 'held_out'}"]

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        results = load_evaluations(run, f"{REWARD}/mean")
        for (samples, _), name in ((results[0], "before"), (results[-1], "after")):
            write_pairs(folder / f"{name}.png", samples, folder / "data" / "held_out")
        before, after = results[0][1], results[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items()]
        image_paths = (
            f"Images: {folder / 'before.png'} and {folder / 'after.png'}. In each pair of rows the upper one is the "
            "real clip, the lower one the generated video with the same first frame and actions."
        )
        return [*comparison_table("on held-out clips", rows), "", image_paths]

    def generate_arguments(self, folder: Path) -> str:
        return self.clip_arguments(folder, NUM_HELD_OUT)

    def clip_arguments(self, folder: Path, clip: int) -> str:
        """Return arguments of `wfm generate`. clip: number of the held-out clip. start.png is its first frame."""
        data = folder / "data"
        return (
            f"--prompts {data / PROMPTS} --height {HEIGHT} --width {WIDTH} --frames {NUM_FRAMES} --fps 8 --steps 8 "
            f"--guardrail off --first-frame {data / START} --actions {data / 'held_out' / f'{clip:04}.actions.npy'} "
            f"--seeds 1 2 3 4 --batch 4 --out {folder / 'more'}"
        )


def write_pairs(path: Path, samples: Path, clips: Path) -> None:
    from wfm_ds.monitoring.media_files import image_grid, save_png

    entries = list(read_json_rows(samples / "samples.jsonl"))[:NUM_SHOWN]
    paths = [path for e in entries for path in (clips / f"{e['prompt_id']}.mkv", samples / e["file"])]
    frames = [frame for video in paths for frame in load_video(video)]
    save_png(path, image_grid(frames, NUM_FRAMES, scale=SCALE))
