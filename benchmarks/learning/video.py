"""Measure effects of RL on videos that the reward does not measure: `python -m benchmarks.learning.video`.

The model of the video demo is trained with SFT for each seed and improved with every selected variant. All runs are
ordinary commands. A held-out reward compares the validation videos with the demo's real clips, and the start positions
of the correct videos are counted. The results of trained and held-out (shape, direction) pairs are separate rows.
Writes results/<date>-cpu-video.json, and the first videos of each prompt to docs/images. An interrupted study continues
at the next start.
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
    EVALUATION_TAG,
    JUDGE,
    REWARD,
    STARTS,
    PromptedVideo,
    ShapesDemo,
    count_correct_starts,
    group_by_prompt,
    load_videos,
    mean_scores,
    split_by_pairs,
)
from wfm_ds.monitoring.media_files import image_grid, save_png
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
    "reward": REWARD,
    "right way": f"{REWARD}/right_way",
    "identity": f"{REWARD}/identity",
    "judge: direction": f"{JUDGE}/direction",
    "judge: shape": f"{JUDGE}/shape",
    "judge: both": f"{JUDGE}/both",
    "PSNR to the nearest real clip": JUDGE,
    "share of real clips": f"{JUDGE}/real",
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.video", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/video"), help="folder of the runs")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of RL, and of SFT without --start")
    p.add_argument(
        "--start", type=int, help="seed of the SFT run that all RL runs start from (default: their own seed)"
    )
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(OF_THE_STUDY))
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--name", default="video", help="name of the results' file")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    train_starts(out, args.seeds if args.start is None else [args.start], ShapesDemo())
    runs = [make_run(out, name, seed, args.start) for name in args.variants for seed in args.seeds]
    train_all(out, runs, args.jobs)
    first_runs = list({run.start: run for run in reversed(runs)}.values())  # of each start
    rows = [row for run in runs for row in run_rows(out, run, with_start=run in first_runs)]
    curves = {run.name: run_curve(out, run) for run in runs}
    path = report.write_results(
        args.name, report.describe_machine() | {"runs": list_revisions(out, runs)}, rows, curves=curves
    )
    shown = {"SFT": list_samples(out, runs[0])[0]} | {
        SHOWN[name]: list_samples(out, make_run(out, name, args.seeds[0], args.start))[-1]
        for name in args.variants
        if name in SHOWN
    }
    if len(shown) == 1 + len(SHOWN):  # otherwise the image is not written
        write_comparison(PICTURE, {title: load_videos(samples) for title, samples in shown.items()})
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n")


def make_run(out: Path, variant: str, seed: int, start: int | None) -> StudyRun:
    """start: seed of the SFT run; None for the same seed."""
    start = seed if start is None else start
    name = f"{variant}_{seed}" if start == seed else f"{variant}_{seed}_from_{start}"
    return StudyRun(name, VARIANTS[variant], start, seed, tuple(ShapesDemo().rl_overrides(out)))


def run_rows(out: Path, run: StudyRun, *, with_start: bool) -> list[dict[str, Any]]:
    """Return the rows for the end of a run, with the rows for its start before them if `with_start`."""
    found = load_evaluations(out / run.name, EVALUATION_TAG)
    more = {"seed of SFT": run.start, "alarm at RL step": first_alarm_step(found)}
    end = [row | more for row in metric_rows(run.variant.title, run.seed, found[-1][0])]
    return [*metric_rows("SFT", run.start, found[0][0]), *end] if with_start else end


def run_curve(out: Path, run: StudyRun) -> list[dict[str, Any]]:
    """Return the metrics of all evaluations of a run, ordered by RL step."""
    return [
        {"RL step": int(samples.name.removeprefix("step_"))} | row
        for samples in list_samples(out, run)
        for row in metric_rows(run.variant.title, run.seed, samples)
    ]


def list_samples(out: Path, run: StudyRun) -> list[Path]:
    return [samples for samples, _ in load_evaluations(out / run.name, EVALUATION_TAG)]


def metric_rows(title: str, seed: int, samples: Path) -> list[dict[str, Any]]:
    """Return the means of an evaluation, one row for the trained pairs and one row for the held-out pairs."""
    rows = []
    for pairs, videos in split_by_pairs(load_videos(samples)).items():
        starts = {STARTS: count_correct_starts(videos)}
        rows.append({"model": title, "seed": seed, "pairs": pairs} | mean_scores(videos, COLUMNS) | starts)
    return rows


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
