"""`python -m benchmarks.learning`: what does each algorithm reach from the same start, and for how many forwards?

Trains the quickstart's digits model once for each start, then improves it by every variant and seed that is asked for;
all runs are the ordinary command. Cost is counted in samples through the denoiser, 1 for a forward and 3 for one with
a backward pass; rollouts, references and training count, evaluations do not. Each variant is repeated with the rewards
shuffled among the samples, from which nothing may be learnt. Writes results/<date>-cpu-<name>.json and, beside the
documentation, the curves. A study that was interrupted goes on where it stopped.
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
from benchmarks.learning.curves import Evaluation, crossing, evaluations, mean_or_none
from benchmarks.learning.pictures import plot
from benchmarks.learning.runs import REVISION, Run, revisions, train_all, train_starts
from benchmarks.learning.variants import BASELINES, GOALS, LEVELS, OF_THE_STUDY, REPOSITORY, VARIANTS
from wfm_ds.program import run_command

PICTURES = REPOSITORY / "docs" / "images"
Curves = Mapping[tuple[str, int], list[list[Evaluation]]]
"""The curves of a variant from a start, one for each seed."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/learning"), help="where the runs are kept")
    p.add_argument("--starts", type=int, nargs="+", choices=LEVELS, default=list(LEVELS), help="seeds of SFT")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of RL")
    p.add_argument("--algorithms", nargs="+", choices=VARIANTS, default=list(OF_THE_STUDY))
    p.add_argument("--controls", type=int, default=1, help="seeds that are repeated with shuffled rewards")
    p.add_argument("--jobs", type=int, default=2, help="runs at a time")
    p.add_argument("--name", default="learning", help="of the results' file and of the picture")
    p.add_argument("--finished", action="store_true", help="train nothing: report the runs that are there")
    return p


def study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    runs = {
        (name, start): [Run(f"{name}_{start}_{seed}", VARIANTS[name], start, seed) for seed in args.seeds]
        for start in args.starts
        for name in args.algorithms
        if start in VARIANTS[name].starts
    }
    controls = {
        (name, start): [
            Run(f"{name}_{start}_{seed}_shuffled", VARIANTS[name], start, seed, ("reward.shuffle=true",))
            for seed in args.seeds[: args.controls]
        ]
        for name, start in runs
        if start == args.starts[0]
    }
    if args.finished:
        runs, controls = finished(out, runs), finished(out, controls)
    else:
        train_starts(out, args.starts)
        train_all(out, [run for some in (runs, controls) for of_one in some.values() for run in of_one], args.jobs)
    curves = {key: [evaluations(out / run.name) for run in of_key] for key, of_key in runs.items()}
    shuffled = {key: [evaluations(out / run.name) for run in of_key] for key, of_key in controls.items()}
    rows = [
        row(curves, shuffled.get(key, []), *key)
        | {"seeds": ", ".join(str(run.seed) for run in of_key), "revision of the runs": revisions(out, of_key)}
        for key, of_key in runs.items()
    ]
    details = {
        f"{name}_{start}": [list(map(asdict, curve)) for curve in of_key] for (name, start), of_key in curves.items()
    }
    path = report.write(args.name, report.machine(), rows, curves=details)
    picture = PICTURES / f"{args.name}.png"
    plot(curves, picture)
    sys.stdout.write(f"{report.table(json.loads(path.read_text())['rows'])}\n\n{path}\n{picture}\n")


def finished(out: Path, runs: Mapping[tuple[str, int], list[Run]]) -> dict[tuple[str, int], list[Run]]:
    """Return the runs that are there; without the variants that have none from a start."""
    there = {key: [run for run in of_key if (out / run.name / REVISION).exists()] for key, of_key in runs.items()}
    return {key: of_key for key, of_key in there.items() if of_key}


def row(curves: Curves, shuffled: Sequence[list[Evaluation]], name: str, start: int) -> dict[str, Any]:
    """Return what a variant reached from a start: by seed, and in the mean over seeds where all of them reached it."""
    of_seeds = curves[name, start]
    cells: dict[str, Any] = {"algorithm": VARIANTS[name].title, "start": start}
    for level in LEVELS[start]:
        cells[f"thousand forwards to reward {level:.2f}"] = listed(reached(of_seeds, level), 1e-3, ".1f")
    goal = reached(of_seeds, GOALS[start])
    cells |= {f"{GOALS[start]:.2f}, mean over seeds": scaled(mean_or_none(goal), 1e-3)}
    for other in BASELINES:
        if (other, start) in curves and other != name:
            cells[f"forwards relative to {VARIANTS[other].title}"] = relative(goal, curves[other, start], GOALS[start])
    return cells | {
        "end: thousand forwards": statistics.mean(curve[-1].forwards for curve in of_seeds) / 1e3,
        "end: reward": listed([curve[-1].reward for curve in of_seeds]),
        "end: unseen judge": listed([curve[-1].unseen for curve in of_seeds]),
        "end: spread": listed([curve[-1].spread for curve in of_seeds]),
        "rewards shuffled, end: reward": listed([curve[-1].reward for curve in shuffled]),
    }


def reached(of_seeds: Sequence[list[Evaluation]], level: float) -> list[float | None]:
    """The forwards to a held-out reward, by seed."""
    return [crossing([e.forwards for e in curve], [e.reward for e in curve], level) for curve in of_seeds]


def relative(ours: Sequence[float | None], theirs: Sequence[list[Evaluation]], level: float) -> str:
    """Return our mean over theirs. A run of theirs that did not reach the level counts with all that it cost, which is
    too little: then it is an upper bound."""
    found = reached(theirs, level)
    mean = mean_or_none(ours)
    if mean is None:
        return ""
    cost = [curve[-1].forwards if at is None else at for curve, at in zip(theirs, found, strict=True)]
    return f"{'at most ' if None in found else ''}{mean / statistics.mean(cost):.2f}"


def listed(values: Sequence[float | None], factor: float = 1.0, form: str = ".3f") -> str:
    return ", ".join("-" if value is None else format(value * factor, form) for value in values)


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


if __name__ == "__main__":
    sys.exit(main())
