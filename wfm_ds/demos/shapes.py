"""The shapes demo: videos of 5 frames, rewarded if the prompted shape moves in the prompted direction.

A held-out reward compares each video with the nearest real clip.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from wfm_ds.demos.base import Demo, comparison_table, load_evaluations
from wfm_ds.demos.shapes_data import write_moving
from wfm_reward.moving_demo import NUM_VARIANTS, Frames, find_nearest_clip, measure_cells

REWARD = "val/reward/moving"
JUDGE = "val/held_out/nearest_clip"
METRICS: Mapping[str, str] = {
    "reward": f"{REWARD}/mean",
    "- moves more than half of the distance in the right direction": f"{REWARD}/right_way/mean",
    "- looks like the shape in every frame": f"{REWARD}/identity/mean",
    "held-out reward: nearest real clip has the right shape": f"{JUDGE}/shape/mean",
    "held-out reward: nearest real clip has the right direction": f"{JUDGE}/direction/mean",
    "held-out reward: both are right": f"{JUDGE}/both/mean",
    "held-out reward: PSNR to the nearest real clip, dB": f"{JUDGE}/mean",
    "held-out reward: fraction of videos that match a real clip": f"{JUDGE}/real/mean",
}
STARTS = f"correct starts hit, of {NUM_VARIANTS}"
NUM_SHOWN = 6  # videos per prompt in the animation
FPS = 4  # of the animation; slow because it has only five frames


class ShapesDemo(Demo):
    name = "moving"
    description = "moving shapes"
    sft_data = "videos"
    output = Path("outputs/quickstart-video")

    def write_data(self, out: Path) -> int:
        return write_moving(out)

    def sft_overrides(self, folder: Path) -> list[str]:
        prompts = folder / "data" / "prompts" / "train.jsonl"
        return [f"validation.prompts={prompts}", f"data.cache_dir={folder / 'cache'}"]

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        results = load_evaluations(run, f"{REWARD}/mean")
        starts = []
        for (samples_folder, _), name in ((results[0], "before"), (results[-1], "after")):
            videos = load_videos(samples_folder)
            write_strips(folder / f"{name}.png", videos)
            write_animation(folder / f"{name}.gif", videos)
            starts.append(count_correct_starts(videos))
        before, after = results[0][1], results[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items()]
        rows.append((f"{STARTS}, mean over prompts", starts[0], starts[1]))
        image_paths = f"Images: {folder / 'before.png'} and {folder / 'after.png'}. Animations: the same names as .gif."
        return [*comparison_table("on held-out noise seeds, 120 videos", rows, digits=2), "", image_paths]

    def generate_arguments(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / 'prompts' / 'train.jsonl'} --height 32 --width 32 --frames 5 --fps 8 "
            f"--steps 12 --seeds 1 2 3 4 --batch 48 --out {folder / 'more'}"
        )


@dataclass(frozen=True, slots=True)
class PromptedVideo:
    prompt: str
    frames: Frames  # [5,32,32,3]


def load_videos(folder: Path) -> list[PromptedVideo]:
    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [PromptedVideo(entry["prompt"], load_video(folder / entry["file"])) for entry in entries]


def load_video(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def group_by_prompt(videos: Sequence[PromptedVideo]) -> dict[str, list[Frames]]:
    groups: dict[str, list[Frames]] = {}
    for video in videos:
        groups.setdefault(video.prompt, []).append(video.frames)
    return groups


def count_correct_starts(videos: Sequence[PromptedVideo]) -> float:
    """Return how many different start positions the correct videos of a prompt have, averaged over prompts.

    A video is correct if its nearest real clip has the same prompt. A model that always generates the same correct
    video scores 1. A model without correct videos scores 0.
    """
    counts = []
    for prompt, frame_lists in group_by_prompt(videos).items():
        clips = [find_nearest_clip(measure_cells(frames))[0] for frames in frame_lists]
        counts.append(len({clip.variant for clip in clips if clip.prompt == prompt}))
    return float(np.mean(counts))


def write_strips(path: Path, videos: Sequence[PromptedVideo]) -> None:
    """Write an image with a row per prompt. A row contains the frames of two videos side by side."""
    from wfm_ds.monitoring.images import image_grid, save_png

    shown = {prompt: frame_lists[:2] for prompt, frame_lists in group_by_prompt(videos).items()}
    images = [frame for frame_lists in shown.values() for frames in frame_lists for frame in frames]
    save_png(path, image_grid(images, len(images) // len(shown), row_titles=[*shown]))


def write_animation(path: Path, videos: Sequence[PromptedVideo]) -> None:
    """Write an animated GIF with a column of NUM_SHOWN videos per prompt."""
    from wfm_ds.monitoring.images import image_grid
    from wfm_ds.monitoring.videos import encode_gif

    columns = [frame_lists[:NUM_SHOWN] for frame_lists in group_by_prompt(videos).values()]
    cells = [frames for row in zip(*columns, strict=True) for frames in row]
    images = [image_grid([frames[time] for frames in cells], len(columns)) for time in range(len(cells[0]))]
    path.write_bytes(encode_gif(np.stack([*images, images[-1]]), FPS))  # show the last frame twice
