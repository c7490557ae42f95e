"""Measure the reward and the forward passes of each algorithm from the same start: `python -m benchmarks.learning`.

Trains the digits model of the quickstart for each start, then improves it with every selected variant and seed. All
runs are ordinary commands. Cost is the number of samples through the denoiser: 1 for a forward pass, 3 for a forward
and backward pass. Rollouts, reference predictions and training count; evaluations do not. Each variant is repeated with
rewards shuffled among the samples, as a control that cannot learn anything. Writes results/<date>-cpu-<name>.json, and
the curves to docs/images. An interrupted study continues at the next start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.learning.curves import Evaluation, find_crossing, mean_or_none, read_evaluations
from benchmarks.learning.pictures import plot_curves
from benchmarks.learning.runs import REVISION, StudyRun, list_revisions, train_all, train_starts
from benchmarks.learning.variants import BASELINES, GOALS, LEVELS, OF_THE_STUDY, REPOSITORY, VARIANTS
from wfm_ds.program import run_command

PICTURES = REPOSITORY / "docs" / "images"
Curves = Mapping[tuple[str, int], list[list[Evaluation]]]
"""Curves of a variant from a start, one for each seed."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/learning"), help="folder of the runs")
    p.add_argument("--starts", type=int, nargs="+", choices=LEVELS, default=[0, 1], help="seeds of SFT")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of RL")
    p.add_argument("--algorithms", nargs="+", choices=VARIANTS, default=list(OF_THE_STUDY))
    p.add_argument("--controls", type=int, default=1, help="number of seeds to repeat with shuffled rewards")
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--name", default="learning", help="name of the results' file and of the image")
    p.add_argument("--finished", action="store_true", help="only report the finished runs")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    runs = {
        (name, start): [StudyRun(f"{name}_{start}_{seed}", VARIANTS[name], start, seed) for seed in args.seeds]
        for start in args.starts
        for name in args.algorithms
        if start in VARIANTS[name].starts
    }
    controls = {
        (name, start): [
            StudyRun(f"{name}_{start}_{seed}_shuffled", VARIANTS[name], start, seed, ("reward.shuffle=true",))
            for seed in args.seeds[: args.controls]
        ]
        for name, start in runs
        if start == args.starts[0]
    }
    if args.finished:
        runs, controls = select_finished(out, runs), select_finished(out, controls)
    else:
        train_starts(out, args.starts)
        train_all(out, [run for some in (runs, controls) for of_one in some.values() for run in of_one], args.jobs)
    curves = {key: [read_evaluations(out / run.name) for run in of_key] for key, of_key in runs.items()}
    shuffled = {key: [read_evaluations(out / run.name) for run in of_key] for key, of_key in controls.items()}
    rows = [
        variant_row(curves, shuffled.get(key, []), *key)
        | {"seeds": ", ".join(str(run.seed) for run in of_key), "revision of the runs": list_revisions(out, of_key)}
        for key, of_key in runs.items()
    ]
    details = {
        f"{name}_{start}": [list(map(asdict, curve)) for curve in of_key] for (name, start), of_key in curves.items()
    }
    path = report.write_results(args.name, report.describe_machine(), rows, curves=details)
    picture = PICTURES / f"{args.name}.png"
    plot_curves(curves, picture)
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n{picture}\n")


def select_finished(out: Path, runs: Mapping[tuple[str, int], list[StudyRun]]) -> dict[tuple[str, int], list[StudyRun]]:
    """Return the finished runs by (variant, start). A key without finished runs is omitted."""
    there = {key: [run for run in of_key if (out / run.name / REVISION).exists()] for key, of_key in runs.items()}
    return {key: of_key for key, of_key in there.items() if of_key}


def variant_row(curves: Curves, shuffled: Sequence[list[Evaluation]], name: str, start: int) -> dict[str, Any]:
    """Return the results of a variant from a start: for each seed, and the mean over seeds if all reached the level."""
    of_seeds = curves[name, start]
    cells: dict[str, Any] = {"algorithm": VARIANTS[name].title, "start": start}
    for level in LEVELS[start]:
        cells[f"thousand forwards to reward {level:.2f}"] = format_list(forwards_to_level(of_seeds, level), 1e-3, ".1f")
    goal = forwards_to_level(of_seeds, GOALS[start])
    cells |= {f"{GOALS[start]:.2f}, mean over seeds": scale_value(mean_or_none(goal), 1e-3)}
    for other in BASELINES:
        if (other, start) in curves and other != name:
            cells[f"forwards relative to {VARIANTS[other].title}"] = relative_cost(
                goal, curves[other, start], GOALS[start]
            )
    return cells | {
        "end: thousand forwards": statistics.mean(curve[-1].forwards for curve in of_seeds) / 1e3,
        "end: reward": format_list([curve[-1].reward for curve in of_seeds]),
        "end: unseen judge": format_list([curve[-1].unseen for curve in of_seeds]),
        "end: spread": format_list([curve[-1].spread for curve in of_seeds]),
        "rewards shuffled, end: reward": format_list([curve[-1].reward for curve in shuffled]),
    }


def forwards_to_level(of_seeds: Sequence[list[Evaluation]], level: float) -> list[float | None]:
    """Return the forward passes until a validation reward, for each seed."""
    return [find_crossing([e.forwards for e in curve], [e.reward for e in curve], level) for curve in of_seeds]


def relative_cost(ours: Sequence[float | None], theirs: Sequence[list[Evaluation]], level: float) -> str:
    """Return the ratio of our mean cost to the baseline's. A baseline run that did not reach the level counts with its
    whole cost, which is too low, so the ratio is an upper bound."""
    found = forwards_to_level(theirs, level)
    mean = mean_or_none(ours)
    if mean is None:
        return ""
    cost = [curve[-1].forwards if at is None else at for curve, at in zip(theirs, found, strict=True)]
    return f"{'at most ' if None in found else ''}{mean / statistics.mean(cost):.2f}"


def format_list(values: Sequence[float | None], factor: float = 1.0, form: str = ".3f") -> str:
    return ", ".join("-" if value is None else format(value * factor, form) for value in values)


def scale_value(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


if __name__ == "__main__":
    sys.exit(main())
