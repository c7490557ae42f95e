"""The quickstart's moving shapes: videos of 5 frames, rewarded if the shape that was asked for moves where it was asked
to, and judged by the real clip that they look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from wfm_ds.data.moving import write_moving
from wfm_ds.quickstart.world import World, evaluations, table
from wfm_reward.moving_world import NUM_PLACES, Frames, cells_of, nearest

REWARD = "val/reward/moving"
JUDGE = "val/judge/nearest_clip"
METRICS: Mapping[str, str] = {
    "reward": f"{REWARD}/mean",
    "- moves more than half of the way in the right direction": f"{REWARD}/right_way/mean",
    "- looks like the shape in every frame": f"{REWARD}/identity/mean",
    "judge: nearest real clip has the right shape": f"{JUDGE}/shape/mean",
    "judge: nearest real clip has the right direction": f"{JUDGE}/direction/mean",
    "judge: both": f"{JUDGE}/both/mean",
    "judge: PSNR to the nearest real clip, dB": f"{JUDGE}/mean",
    "judge: share of real clips": f"{JUDGE}/real/mean",
}
STARTS = f"correct starts hit, of {NUM_PLACES}"
NUM_SHOWN = 6  # videos of a prompt in an animation
FPS = 4  # of it: five frames are soon over


class MovingShapes(World):
    """Shapes that move across a dark field."""

    name = "moving"
    what = "moving shapes"
    media = "videos"
    output = Path("outputs/quickstart-video")

    def write(self, out: Path) -> int:
        return write_moving(out)

    def sft_overrides(self, folder: Path) -> list[str]:
        prompts = folder / "data" / "prompts" / "train.jsonl"
        return [f"validation.prompts={prompts}", f"data.cache_dir={folder / 'cache'}"]

    def show(self, folder: Path, run: Path) -> list[str]:
        found = evaluations(run, f"{REWARD}/mean")
        starts = []
        for (samples_folder, _), name in ((found[0], "before"), (found[-1], "after")):
            videos = load_videos(samples_folder)
            write_strips(folder / f"{name}.png", videos)
            write_animation(folder / f"{name}.gif", videos)
            starts.append(starts_hit(videos))
        before, after = found[0][1], found[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items()]
        rows.append((f"{STARTS}, mean over prompts", starts[0], starts[1]))
        pictures = f"Pictures: {folder / 'before.png'} and {folder / 'after.png'}, each beside a .gif of the same name."
        return [*table("on held-out noise seeds, 120 videos", rows, digits=2), "", pictures]

    def more(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / 'prompts' / 'train.jsonl'} --height 32 --width 32 --frames 5 --fps 8 "
            f"--steps 12 --seeds 1 2 3 4 --batch 48 --out {folder / 'more'}"
        )


@dataclass(frozen=True, slots=True)
class Video:
    """A video that was asked for."""

    prompt: str
    frames: Frames  # [5,32,32,3]


def load_videos(folder: Path) -> list[Video]:
    """Videos with their prompts, in the order of samples.jsonl."""
    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [Video(entry["prompt"], load_video(folder / entry["file"])) for entry in entries]


def load_video(path: Path) -> Frames:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def by_prompt(videos: Sequence[Video]) -> dict[str, list[Frames]]:
    found: dict[str, list[Frames]] = {}
    for video in videos:
        found.setdefault(video.prompt, []).append(video.frames)
    return found


def starts_hit(videos: Sequence[Video]) -> float:
    """Number of the places that a prompt's videos begin at, of those whose nearest real clip is what was asked for;
    the mean over prompts. A model that always draws the same right video has 1, one with nothing right 0."""
    hit = []
    for prompt, media in by_prompt(videos).items():
        clips = [nearest(cells_of(frames))[0] for frames in media]
        hit.append(len({clip.place for clip in clips if clip.prompt == prompt}))
    return float(np.mean(hit))


def write_strips(path: Path, videos: Sequence[Video]) -> None:
    """Two videos of each prompt beside each other, frame by frame, a row a prompt."""
    from wfm_ds.monitoring.pictures import grid, save_png

    shown = {prompt: media[:2] for prompt, media in by_prompt(videos).items()}
    images = [frame for media in shown.values() for frames in media for frame in frames]
    save_png(path, grid(images, len(images) // len(shown), row_titles=[*shown]))


def write_animation(path: Path, videos: Sequence[Video]) -> None:
    """NUM_SHOWN videos of each prompt, a column a prompt."""
    from wfm_ds.monitoring.pictures import grid
    from wfm_ds.monitoring.videos import gif_bytes

    prompts = [media[:NUM_SHOWN] for media in by_prompt(videos).values()]
    rows = [media for row in zip(*prompts, strict=True) for media in row]
    moments = [grid([frames[time] for frames in rows], len(prompts)) for time in range(len(rows[0]))]
    path.write_bytes(gif_bytes(np.stack([*moments, moments[-1]]), FPS))  # rests a moment at the end
