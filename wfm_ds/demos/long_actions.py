"""The long-video demo: videos of 12 clips, in which each clip starts from the last frame of the clip before it.

The report compares the SFT model, RL on single clips, and RL in which the policy continues its own clips.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wfm_ds.demos.actions import ActionsDemo
from wfm_ds.demos.base import load_evaluations
from wfm_ds.demos.long_actions_data import NUM_CLIPS, WALK_SETS, write_walks
from wfm_ds.demos.shapes import load_video
from wfm_ds.monitoring.line_chart import Curve, chart_html
from wfm_ds.storage.json_lines import read_json_rows
from wfm_reward.brightness_demo import FRAMES_PER_MOVE

PSNR = "val/recording/psnr"
FOLLOWING = ("val/held_out/brightness/following", "val/reward/brightness/following")  # as held-out or trained reward
TITLES: Mapping[str, str] = {
    "sft": "SFT",
    "nft": "RL on single clips",
    "nft_history": "RL on own history",
    "nft_naive": "RL on own history, naive reward",
}
"""{name of a recipe and its run folder: title}."""
PSNR_CLIPS, FOLLOWING_CLIPS = (1, 4, 8, 12), (1, 12)  # in the table
NUM_SHOWN = 3  # walks in the image
SCALE = 2
IMAGE_FILE = "walks.png"

ClipScores = Mapping[str, Curve]
"""{title of a model: [(clip, mean score)]}."""


class LongActionsDemo(ActionsDemo):
    name = "long"
    pipeline = "world"
    description = "a grey wall that follows actions for 12 clips"
    rl_data = "walks"
    rl_recipes = ("nft", "nft_history")
    output = Path("outputs/quickstart-long")
    write_data = staticmethod(write_walks)

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        runs = list_runs(folder)
        write_walk_image(folder / IMAGE_FILE, runs, folder / "data" / "held_out")
        image_path = (
            f"Image: {folder / IMAGE_FILE}. In each group of rows, the first one is the recorded video, and the others "
            "are the videos of the models with the same first frame and actions."
        )
        return [*clip_table(load_clip_scores(runs, PSNR), load_clip_scores(runs, *FOLLOWING)), "", image_path]

    def page_sections(self, folder: Path, run: Path) -> list[str]:
        runs = list_runs(folder)
        psnr = load_clip_scores(runs, PSNR)
        top = max(value for curve in psnr.values() for _, value in curve)
        return [
            "<h2>PSNR to the recorded video by clip, in dB</h2>",
            chart_html(psnr, "clip", (0.0, 4 * (top // 4 + 1))),
            "<h2>Fraction of actions followed by clip</h2>",
            chart_html(load_clip_scores(runs, *FOLLOWING), "clip"),
            "<h2>Samples</h2>",
            f'<p><img src="{IMAGE_FILE}" alt="recorded and generated videos"></p>',
        ]

    def generate_arguments(self, folder: Path) -> str:
        return f"--clips {NUM_CLIPS} {self.clip_arguments(folder, WALK_SETS[-1].num_videos)}"


def list_runs(folder: Path) -> dict[str, Path]:
    return {title: folder / name for name, title in TITLES.items() if (folder / name / "result.json").exists()}


def load_clip_scores(runs: Mapping[str, Path], *prefixes: str) -> ClipScores:
    """Return {title: [(clip, mean score)]} from the last evaluation of each run. runs: {title: run folder}.

    prefixes: metric names without `/clip_K`. The first one that a run has is used.
    """
    scores = {}
    for title, run in runs.items():
        metrics = list(read_json_rows(run / "metrics.jsonl"))
        prefix = next(p for p in prefixes if any(f"{p}/clip_01" in record for record in metrics))
        _, last = load_evaluations(run, f"{prefix}/clip_01")[-1]
        scores[title] = [(clip, last[f"{prefix}/clip_{clip:02}"]) for clip in range(1, NUM_CLIPS + 1)]
    return scores


def clip_table(psnr: ClipScores, following: ClipScores) -> list[str]:
    heads = [*(f"PSNR, clip {k}" for k in PSNR_CLIPS), *(f"actions followed, clip {k}" for k in FOLLOWING_CLIPS)]
    rows = []
    for title in psnr:
        by_clip, followed = dict(psnr[title]), dict(following[title])
        cells = [*(f"{by_clip[k]:.1f}" for k in PSNR_CLIPS), *(f"{followed[k]:.3f}" for k in FOLLOWING_CLIPS)]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return [f"| on {WALK_SETS[-1].num_videos} held-out walks | {' | '.join(heads)} |", "|---" * 7 + "|", *rows]


def write_walk_image(path: Path, runs: Mapping[str, Path], held_out: Path) -> None:
    """Write an image with groups of rows: a recorded video, and below it each model's video with the same actions.

    A row has one frame per move.
    """
    from wfm_ds.monitoring.media_files import image_grid, save_png

    samples = {title: read_walks(run) for title, run in runs.items()}
    frames, titles = [], []
    for prompt_id in list(next(iter(samples.values())))[:NUM_SHOWN]:
        videos: dict[str, Path] = {"recorded": held_out / f"{prompt_id}.mkv"}
        videos |= {title: walks[prompt_id] for title, walks in samples.items()}
        for title, video in videos.items():
            frames += list(load_video(video)[::FRAMES_PER_MOVE])
            titles.append(title)
    save_png(path, image_grid(frames, len(frames) // len(titles), scale=SCALE, row_titles=titles))


def read_walks(run: Path) -> dict[str, Path]:
    """Return {prompt id: video file} of the first noise seed in the last evaluation of a run."""
    folder, _ = load_evaluations(run, f"{PSNR}/clip_01")[-1]
    files: dict[str, Path] = {}
    for row in read_json_rows(folder / "samples.jsonl"):
        files.setdefault(row["prompt_id"], folder / row["file"])
    return files
