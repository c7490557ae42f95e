"""`python -m benchmarks.learning.video`: what does RL do to videos that its reward does not say?

The video quickstart's moving shapes are trained by SFT once for each seed and improved by every variant that is asked
for; all runs are the ordinary command. A judge that no run is rewarded by compares the held-out videos with the world's
real clips, and the places that the right ones begin at are counted. Writes results/<date>-cpu-video.json and, beside
the documentation, the first videos of each prompt. A study that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.learning.runs import Run, revisions, train_all, train_starts
from benchmarks.learning.variants import REPOSITORY, Variant
from wfm_ds.monitoring.images import image_grid, save_png
from wfm_ds.program import run_command
from wfm_ds.quickstart.moving import (
    JUDGE,
    REWARD,
    STARTS,
    PromptedVideo,
    ShapesDemo,
    count_correct_starts,
    group_by_prompt,
    load_videos,
)
from wfm_ds.quickstart.world import load_evaluations

PICTURE = REPOSITORY / "docs" / "images" / "video.png"
MOVING = REPOSITORY / "recipes" / "moving"
SHUFFLED = ("reward.shuffle=true",)
EVERY = 8  # RL steps between evaluations


def variant(title: str, recipe: str, *overrides: str) -> Variant:
    return Variant(title, MOVING / f"{recipe}.yaml", overrides, every=EVERY)


VARIANTS: Mapping[str, Variant] = {
    "nft": variant("DiffusionNFT", "nft"),
    "nft_naive": variant("DiffusionNFT, naive reward", "nft_naive"),
    "nft_shuffled": variant("DiffusionNFT, rewards shuffled", "nft", *SHUFFLED),
    "flow_grpo": variant("FlowGRPO-Fast", "flow_grpo"),
    "nft_naive_kl": variant("DiffusionNFT, naive reward, kl_beta 1", "nft_naive", "algorithm.kl_beta=1"),
    "nft_kl_weak": variant("DiffusionNFT, kl_beta .1", "nft", "algorithm.kl_beta=0.1"),
    "nft_kl_strong": variant("DiffusionNFT, kl_beta 1", "nft", "algorithm.kl_beta=1"),
    "nft_slow": variant("DiffusionNFT, half the learning rate", "nft", "optimizer.lr=1.5e-3"),
    "nft_long": variant("DiffusionNFT, twice the steps", "nft", "run.steps=80"),
    "nft_published": variant(
        "DiffusionNFT, published settings",
        "nft",
        "sampling={height: 32, width: 32, num_frames: 5, fps: 8, steps: 10, eval_steps: 12}",
        "algorithm={name: diffusion_nft, timestep_fraction: 0.5, kl_beta: 1e-4}",
        "optimizer.lr=1e-3",
        "optimizer.schedule=constant",
        "data.choose=even",
        "ema.decay=0.9",
    ),
}
OF_THE_STUDY = ("nft", "nft_naive", "nft_shuffled", "flow_grpo")
SHOWN: Mapping[str, str] = {"nft": "RL", "nft_naive": "RL, naive"}  # beside SFT in the picture
COLUMNS: Mapping[str, str] = {
    "reward": f"{REWARD}/mean",
    "right way": f"{REWARD}/right_way/mean",
    "identity": f"{REWARD}/identity/mean",
    "judge: direction": f"{JUDGE}/direction/mean",
    "judge: shape": f"{JUDGE}/shape/mean",
    "judge: both": f"{JUDGE}/both/mean",
    "PSNR to the nearest real clip": f"{JUDGE}/mean",
    "share of real clips": f"{JUDGE}/real/mean",
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.video", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/video"), help="where the runs are kept")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of SFT, and of RL from it")
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(OF_THE_STUDY))
    p.add_argument("--jobs", type=int, default=2, help="runs at a time")
    p.add_argument("--name", default="video", help="of the results' file")
    return p


def study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    train_starts(out, args.seeds, ShapesDemo())
    runs = [Run(f"{name}_{seed}", VARIANTS[name], seed, seed) for name in args.variants for seed in args.seeds]
    train_all(out, runs, args.jobs)
    rows = [row for run in runs for row in rows_of(out, run, with_start=run.variant is runs[0].variant)]
    curves = {run.name: curve_of(out, run) for run in runs}
    path = report.write(args.name, report.machine() | {"runs": revisions(out, runs)}, rows, curves=curves)
    shown = {"SFT": samples_of(out, runs[0])[0]} | {
        SHOWN[name]: samples_of(out, Run(f"{name}_{args.seeds[0]}", VARIANTS[name], args.seeds[0], args.seeds[0]))[-1]
        for name in args.variants
        if name in SHOWN
    }
    if len(shown) == 1 + len(SHOWN):  # a study without one of them leaves the picture alone
        write_comparison(PICTURE, {title: load_videos(samples) for title, samples in shown.items()})
    sys.stdout.write(f"{report.table(json.loads(path.read_text())['rows'])}\n\n{path}\n")


def rows_of(out: Path, run: Run, *, with_start: bool) -> list[dict[str, Any]]:
    """Return the row of a run's end, after that of its start where asked for."""
    found = load_evaluations(out / run.name, f"{REWARD}/mean")
    end = cells(run.variant.title, run.seed, *found[-1]) | {"alarm at RL step": alarm(found)}
    return [cells("SFT", run.start, *found[0]), end] if with_start else [end]


def curve_of(out: Path, run: Run) -> list[dict[str, Any]]:
    """Return the numbers of all of a run's evaluations, in the order of their RL steps."""
    return [
        {"RL step": int(samples.name.removeprefix("step_"))} | cells(run.variant.title, run.seed, samples, metrics)
        for samples, metrics in load_evaluations(out / run.name, f"{REWARD}/mean")
    ]


def samples_of(out: Path, run: Run) -> list[Path]:
    return [samples for samples, _ in load_evaluations(out / run.name, f"{REWARD}/mean")]


def cells(title: str, seed: int, samples: Path, metrics: Mapping[str, float]) -> dict[str, Any]:
    values = {column: metrics[tag] for column, tag in COLUMNS.items()}
    return {"model": title, "seed": seed, **values, STARTS: count_correct_starts(load_videos(samples))}


def alarm(found: Sequence[tuple[Path, Mapping[str, float]]]) -> int | None:
    """Return the RL step whose evaluation raised the alarm first."""
    raised = (int(samples.name.removeprefix("step_")) for samples, metrics in found if metrics.get("val/alarm"))
    return next(raised, None)


def write_comparison(path: Path, models: Mapping[str, Sequence[PromptedVideo]]) -> None:
    """The first video of each prompt by each model: a row a prompt, the models' frames side by side."""
    blocks = []
    for title, videos in models.items():
        firsts = {prompt: media[0] for prompt, media in group_by_prompt(videos).items()}
        frames = [frame for media in firsts.values() for frame in media]
        titles = [f"{title}: {prompt}" if not k else prompt for k, prompt in enumerate(firsts)]
        blocks.append(image_grid(frames, len(frames) // len(firsts), row_titles=titles))
    save_png(path, np.concatenate(blocks, axis=1))


if __name__ == "__main__":
    sys.exit(main())
