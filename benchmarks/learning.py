"""`python -m benchmarks.learning`: does every algorithm learn, from the same start, on the same number of rollouts?

Trains the digits model once for each seed, then improves it by every recipe in recipes/digits/ that is asked for. All
runs are the ordinary command. Each is repeated with the rewards shuffled among the samples, from which nothing may be
learnt. Writes results/<date>-cpu-learning.json and, beside the documentation, the curves. A study that was interrupted
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import report
from benchmarks.flops import step_forwards
from wfm_ds.models import registry
from wfm_ds.quickstart import prepare, train
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.derived import derive

REPOSITORY = Path(__file__).parent.parent
PICTURE = REPOSITORY / "docs" / "images" / "learning.png"
ALGORITHMS = {
    "nft": "DiffusionNFT",
    "flow_grpo": "FlowGRPO",
    "flow_grpo_fast": "FlowGRPO-Fast",
    "ddrl": "DDRL",
}
REWARD, VALIDATION = "reward/digits/mean", "val/reward/digits/mean"
SMOOTHED_OVER = 5  # RL steps of 80 samples


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/learning"), help="where the runs are kept")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    p.add_argument("--controls", type=int, default=2, help="seeds that are repeated with shuffled rewards")
    options = p.parse_args(arguments)
    if not (options.out / "data").exists():
        prepare(options.out)
    runs = {name: [improved(options.out, name, seed) for seed in options.seeds] for name in options.algorithms}
    controls = {
        name: [improved(options.out, name, seed, "reward.shuffle=true") for seed in options.seeds[: options.controls]]
        for name in options.algorithms
    }
    rows = [
        row(name, of_name, controls[name]) | forwards_an_image(of_name[0] / "recipe.yaml")
        for name, of_name in runs.items()
    ]
    path = report.write("learning", report.machine(), rows)
    plot({name: [curve(run) for run in of_name] for name, of_name in runs.items()}, PICTURE)
    sys.stdout.write(f"{report.table(json.loads(path.read_text())['rows'])}\n\n{path}\n{PICTURE}\n")
    return 0


def improved(out: Path, name: str, seed: int, *control: str) -> Path:
    """Return the folder of this algorithm's run, trained unless it is there; `control`: overrides of its recipe."""
    folder = out / f"{name}_{seed}{'_control' if control else ''}"
    if is_finished(folder):
        return folder
    start = train(
        "sft.yaml",
        f"run.output_dir={out / f'sft_{seed}'}",
        f"run.seed={seed}",
        f"model.path={out / 'model'}",
        f"data.path={out / 'data' / 'images'}",
    )
    data = "images" if name == "ddrl" else "prompts"  # DDRL also learns from the images
    train(
        f"{name}.yaml",
        f"run.output_dir={folder}",
        f"run.seed={seed}",
        f"model.path={start['artifacts']['pipeline']}",
        f"data.path={out / 'data' / data}",
        *control,
    )
    return folder


def is_finished(run: Path) -> bool:
    result = run / "result.json"
    return result.exists() and json.loads(result.read_text())["status"] == "finished"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path) -> list[float]:
    """The mean reward of each RL step's rollouts."""
    return [line[REWARD] for line in lines(run) if REWARD in line]


def evaluations(runs: Sequence[Path]) -> list[list[float]]:
    """Return the validation rewards of each run, in the order of its steps."""
    return [[line[VALIDATION] for line in lines(run) if VALIDATION in line] for run in runs]


def mean_gain(values: Sequence[Sequence[float]]) -> float:
    return statistics.mean(of_run[-1] - of_run[0] for of_run in values)


def row(name: str, runs: Sequence[Path], controls: Sequence[Path] = ()) -> dict[str, Any]:
    """Return what was learnt, by seed, and what was with shuffled rewards."""
    learnt, shuffled = evaluations(runs), evaluations(controls)
    about_controls = {
        "after, rewards shuffled": ", ".join(f"{values[-1]:.3f}" for values in shuffled),
        "mean gain, rewards shuffled": mean_gain(shuffled),
    }
    return {
        "algorithm": ALGORITHMS[name],
        "RL steps": sum(REWARD in line for line in lines(runs[0])),
        "before": ", ".join(f"{values[0]:.3f}" for values in learnt),
        "after": ", ".join(f"{values[-1]:.3f}" for values in learnt),
        "mean gain": mean_gain(learnt),
    } | (about_controls if shuffled else {})


def forwards_an_image(recipe: Path) -> dict[str, float]:
    """Samples through the denoiser for each generated image, validation left out."""
    loaded = recipe_file.load(recipe)
    model = registry.load(loaded.model.path, dtype=torch.float32, device="cpu")
    steps = step_forwards(loaded, derive(loaded, 1), model)
    a_step = derive(loaded, 1).samples_per_step
    images = a_step * len(steps)
    trained = sum(step["policy"].samples for step in steps)
    everything = sum(forwards.samples for step in steps for forwards in step.values())
    return {
        "images a step": a_step,
        "forwards an image": everything / images,
        "of these with backward": trained / images,
    }


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Mean reward over RL steps: a line for each algorithm's mean over seeds, the range of its seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, of_seeds in curves.items():
        smooth = np.stack([smoothed(values) for values in of_seeds])
        steps = np.arange(1, smooth.shape[1] + 1)
        (line,) = axes.plot(steps, smooth.mean(0), label=ALGORITHMS[name])
        axes.fill_between(steps, smooth.min(0), smooth.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="RL step", ylabel="mean reward of the rollouts", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def smoothed(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Means over the last SMOOTHED_OVER values, fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - SMOOTHED_OVER, 0)
    means: npt.NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


if __name__ == "__main__":
    sys.exit(main())
