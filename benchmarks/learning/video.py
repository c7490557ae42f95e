"""Measure effects of RL on videos that the reward does not measure: `python -m benchmarks.learning.video`.

The model of the video demo is trained with SFT for each seed and improved with every selected variant. All runs are
ordinary commands. A held-out reward compares the validation videos with the demo's real clips, and the start positions
of the correct videos are counted. Writes results/<date>-cpu-video.json, and the first videos of each prompt to
docs/images. An interrupted study continues at the next start.
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
from benchmarks.learning.runs import StudyRun, list_revisions, train_all, train_starts
from benchmarks.learning.variants import REPOSITORY, Variant
from wfm_ds.demos.base import load_evaluations
from wfm_ds.demos.shapes import (
    JUDGE,
    REWARD,
    STARTS,
    PromptedVideo,
    ShapesDemo,
    count_correct_starts,
    group_by_prompt,
    load_videos,
)
from wfm_ds.monitoring.images import image_grid, save_png
from wfm_ds.program import run_command

PICTURE = REPOSITORY / "docs" / "images" / "video.png"
MOVING = REPOSITORY / "recipes" / "moving"
SHUFFLED = ("reward.shuffle=true",)
EVERY = 8  # RL steps between evaluations


def moving_variant(title: str, recipe: str, *overrides: str) -> Variant:
    return Variant(title, MOVING / f"{recipe}.yaml", overrides, every=EVERY)


VARIANTS: Mapping[str, Variant] = {
    "nft": moving_variant("DiffusionNFT", "nft"),
    "nft_naive": moving_variant("DiffusionNFT, naive reward", "nft_naive"),
    "nft_shuffled": moving_variant("DiffusionNFT, rewards shuffled", "nft", *SHUFFLED),
    "flow_grpo": moving_variant("FlowGRPO-Fast", "flow_grpo"),
    "nft_naive_kl": moving_variant("DiffusionNFT, naive reward, kl_beta 1", "nft_naive", "algorithm.kl_beta=1"),
    "nft_kl_weak": moving_variant("DiffusionNFT, kl_beta .1", "nft", "algorithm.kl_beta=0.1"),
    "nft_kl_strong": moving_variant("DiffusionNFT, kl_beta 1", "nft", "algorithm.kl_beta=1"),
    "nft_slow": moving_variant("DiffusionNFT, half the learning rate", "nft", "optimizer.lr=1.5e-3"),
    "nft_long": moving_variant("DiffusionNFT, twice the steps", "nft", "run.steps=80"),
    "nft_published": moving_variant(
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
SHOWN: Mapping[str, str] = {"nft": "RL", "nft_naive": "RL, naive"}  # shown next to SFT in the image
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
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.video", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/video"), help="folder of the runs")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of SFT and of RL")
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(OF_THE_STUDY))
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--name", default="video", help="name of the results' file")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    train_starts(out, args.seeds, ShapesDemo())
    runs = [StudyRun(f"{name}_{seed}", VARIANTS[name], seed, seed) for name in args.variants for seed in args.seeds]
    train_all(out, runs, args.jobs)
    rows = [row for run in runs for row in run_rows(out, run, with_start=run.variant is runs[0].variant)]
    curves = {run.name: run_curve(out, run) for run in runs}
    path = report.write_results(
        args.name, report.describe_machine() | {"runs": list_revisions(out, runs)}, rows, curves=curves
    )
    shown = {"SFT": list_samples(out, runs[0])[0]} | {
        SHOWN[name]: list_samples(
            out, StudyRun(f"{name}_{args.seeds[0]}", VARIANTS[name], args.seeds[0], args.seeds[0])
        )[-1]
        for name in args.variants
        if name in SHOWN
    }
    if len(shown) == 1 + len(SHOWN):  # otherwise the image is not written
        write_comparison(PICTURE, {title: load_videos(samples) for title, samples in shown.items()})
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n")


def run_rows(out: Path, run: StudyRun, *, with_start: bool) -> list[dict[str, Any]]:
    """Return the row for the end of a run, with the row for its start before it if `with_start`."""
    found = load_evaluations(out / run.name, f"{REWARD}/mean")
    end = metric_cells(run.variant.title, run.seed, *found[-1]) | {"alarm at RL step": first_alarm_step(found)}
    return [metric_cells("SFT", run.start, *found[0]), end] if with_start else [end]


def run_curve(out: Path, run: StudyRun) -> list[dict[str, Any]]:
    """Return the metrics of all evaluations of a run, ordered by RL step."""
    return [
        {"RL step": int(samples.name.removeprefix("step_"))}
        | metric_cells(run.variant.title, run.seed, samples, metrics)
        for samples, metrics in load_evaluations(out / run.name, f"{REWARD}/mean")
    ]


def list_samples(out: Path, run: StudyRun) -> list[Path]:
    return [samples for samples, _ in load_evaluations(out / run.name, f"{REWARD}/mean")]


def metric_cells(title: str, seed: int, samples: Path, metrics: Mapping[str, float]) -> dict[str, Any]:
    values = {column: metrics[tag] for column, tag in COLUMNS.items()}
    return {"model": title, "seed": seed, **values, STARTS: count_correct_starts(load_videos(samples))}


def first_alarm_step(found: Sequence[tuple[Path, Mapping[str, float]]]) -> int | None:
    """Return the RL step of the first evaluation that raised the alarm."""
    raised = (int(samples.name.removeprefix("step_")) for samples, metrics in found if metrics.get("val/alarm"))
    return next(raised, None)


def write_comparison(path: Path, models: Mapping[str, Sequence[PromptedVideo]]) -> None:
    """Write the first video of each prompt by each model: a row for each prompt, the models' frames side by side."""
    blocks = []
    for title, videos in models.items():
        firsts = {prompt: media[0] for prompt, media in group_by_prompt(videos).items()}
        frames = [frame for media in firsts.values() for frame in media]
        titles = [f"{title}: {prompt}" if not k else prompt for k, prompt in enumerate(firsts)]
        blocks.append(image_grid(frames, len(frames) // len(firsts), row_titles=titles))
    save_png(path, np.concatenate(blocks, axis=1))


if __name__ == "__main__":
    sys.exit(main())
