"""The shapes demo: videos of 5 frames, rewarded if the prompted shape moves in the prompted direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import av
import numpy as np

from wfm_ds.demos.base import Demo, comparison_table, load_evaluations
from wfm_ds.demos.shapes_data import HELD_OUT_PROMPTS, write_moving
from wfm_ds.storage.json_lines import read_json_rows
from wfm_reward.moving_demo import NUM_VARIANTS, Frames, find_nearest_clip, measure_cells

REWARD = "moving"
JUDGE = "nearest_clip"
METRICS: Mapping[str, str] = {
    "reward": REWARD,
    "- moves more than half of the distance in the right direction": f"{REWARD}/right_way",
    "- looks like the shape in every frame": f"{REWARD}/identity",
    "held-out reward: nearest real clip has the right shape": f"{JUDGE}/shape",
    "held-out reward: nearest real clip has the right direction": f"{JUDGE}/direction",
    "held-out reward: both are right": f"{JUDGE}/both",
    "held-out reward: PSNR to the nearest real clip, dB": JUDGE,
    "held-out reward: fraction of videos that match a real clip": f"{JUDGE}/real",
}
"""{label: name of a score in samples.jsonl, REWARD or REWARD/PART}."""
EVALUATION_TAG = f"val/reward/{REWARD}/mean"
STARTS = f"correct starts hit, of {NUM_VARIANTS}"
NUM_SHOWN = 6  # videos per prompt in the animation
FPS = 4  # of the animation; slow because it has only five frames


class ShapesDemo(Demo):
    name = "moving"
    description = "moving shapes"
    sft_data = "videos"
    output = Path("outputs/quickstart-video")
    write_data = staticmethod(write_moving)
    curves: ClassVar = {
        "reward, all prompts": EVALUATION_TAG,
        "held-out reward: shape and direction right, all prompts": f"val/held_out/{JUDGE}/both/mean",
    }

    def sft_overrides(self, folder: Path) -> list[str]:
        return [f"data.cache_dir={folder / 'cache'}", *self.rl_overrides(folder)]

    def rl_overrides(self, folder: Path) -> list[str]:
        return [f"validation.prompts={folder / 'data' / 'prompts' / 'validation.jsonl'}"]

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        results = load_evaluations(run, EVALUATION_TAG)
        before, after = (load_videos(samples_folder) for samples_folder, _ in (results[0], results[-1]))
        for videos, name in ((before, "before"), (after, "after")):
            write_strips(folder / f"{name}.png", videos)
            write_animations(folder / name, videos)
        lines = []
        evaluations = [split_by_pairs(videos) for videos in (before, after)]
        for pairs in evaluations[0]:
            groups = [evaluation[pairs] for evaluation in evaluations]
            values = [[*mean_scores(group, METRICS).values(), count_correct_starts(group)] for group in groups]
            rows = list(zip([*METRICS, f"{STARTS}, mean over prompts"], *values, strict=True))
            lines += [*comparison_table(f"{pairs} pairs, {len(groups[0])} videos", rows, digits=2), ""]
        image_paths = (
            f"Images: {folder / 'before.png'} and {folder / 'after.png'}. Animations: the same names as .gif and .mp4."
        )
        return [*lines, image_paths]

    def generate_arguments(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / 'prompts' / 'validation.jsonl'} --height 32 --width 32 --frames 5 --fps 8 "
            f"--steps 12 --seeds 1 2 3 4 --batch 48 --out {folder / 'more'}"
        )


@dataclass(frozen=True, slots=True)
class PromptedVideo:
    prompt: str
    frames: Frames  # [5,32,32,3]
    scores: Mapping[str, float | None] = field(default_factory=dict)  # by `reward` or `reward/part`; None if it failed


def load_videos(folder: Path) -> list[PromptedVideo]:
    return [
        PromptedVideo(entry["prompt"], load_video(folder / entry["file"]), entry["rewards"] | entry.get("parts", {}))
        for entry in read_json_rows(folder / "samples.jsonl")
    ]


def split_by_pairs(videos: Sequence[PromptedVideo]) -> dict[str, list[PromptedVideo]]:
    return {
        "trained": [video for video in videos if video.prompt not in HELD_OUT_PROMPTS],
        "held-out": [video for video in videos if video.prompt in HELD_OUT_PROMPTS],
    }


def mean_scores(videos: Sequence[PromptedVideo], names: Mapping[str, str]) -> dict[str, float]:
    """Return {label: mean score}. names: {label: name in PromptedVideo.scores}. Failed scores are ignored."""
    scores = {label: [video.scores.get(name) for video in videos] for label, name in names.items()}
    return {label: float(np.mean([v for v in values if v is not None])) for label, values in scores.items()}


def load_video(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def group_by_prompt(videos: Sequence[PromptedVideo]) -> dict[str, list[Frames]]:
    groups: dict[str, list[Frames]] = {}
    for video in videos:
        groups.setdefault(video.prompt, []).append(video.frames)
    return groups


def count_correct_starts(videos: Sequence[PromptedVideo]) -> float:
    """Return the number of different start positions in the correct videos of a prompt, averaged over prompts.

    A video is correct if its nearest real clip has the same prompt.
    """
    counts = []
    for prompt, frame_lists in group_by_prompt(videos).items():
        clips = [find_nearest_clip(measure_cells(frames))[0] for frames in frame_lists]
        counts.append(len({clip.variant for clip in clips if clip.prompt == prompt}))
    return float(np.mean(counts))


def write_strips(path: Path, videos: Sequence[PromptedVideo]) -> None:
    from wfm_ds.monitoring.media_files import image_grid, save_png

    shown = {prompt: frame_lists[:2] for prompt, frame_lists in group_by_prompt(videos).items()}
    images = [frame for frame_lists in shown.values() for frames in frame_lists for frame in frames]
    titles = [f"{prompt} (held out)" if prompt in HELD_OUT_PROMPTS else prompt for prompt in shown]
    save_png(path, image_grid(images, len(images) // len(shown), row_titles=titles))


def write_animations(path: Path, videos: Sequence[PromptedVideo]) -> None:
    """Write PATH.gif and PATH.mp4, with the same frames."""
    from wfm_ds.monitoring.media_files import encode_gif, image_grid, save_mp4

    columns = [frame_lists[:NUM_SHOWN] for frame_lists in group_by_prompt(videos).values()]
    cells = [frames for row in zip(*columns, strict=True) for frames in row]
    images = [image_grid([frames[time] for frames in cells], len(columns)) for time in range(len(cells[0]))]
    animation = np.stack([*images, images[-1]])  # show the last frame twice
    path.with_suffix(".gif").write_bytes(encode_gif(animation, FPS))
    save_mp4(path.with_suffix(".mp4"), animation, FPS)
