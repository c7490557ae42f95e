"""Measure the edit demo with each reward alone and with both: `python -m benchmarks.learning.edits`.

The model of the edit demo is trained with SFT for each seed, and improved by DiffusionNFT with both rewards. The runs
with a single reward are controls. All runs are ordinary commands. A row of the result describes the edits of a model on
128 held-out sources, with 8 noise seeds each. Writes results/<date>-cpu-edits.json. An interrupted study continues at
the next start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.learning.runs import StudyRun, list_revisions, train_all, train_starts
from benchmarks.learning.variants import REPOSITORY, Variant
from wfm_ds.demos.edits import EditRow, EditsDemo, load_edits, score_edits
from wfm_ds.program import run_command

RECIPES = REPOSITORY / "recipes" / "edits"
TITLES: Mapping[str, str] = {
    "nft": "both rewards",
    "nft_judge": "edited_digits alone",
    "nft_preservation": "preservation alone",
}
"""{recipe: title in the table}."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run_study, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.learning.edits", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("outputs/edits"), help="folder of the runs")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of SFT and RL")
    p.add_argument("--jobs", type=int, default=2, help="parallel runs")
    p.add_argument("--name", default="edits", help="name of the results' file")
    return p


def run_study(args: argparse.Namespace) -> None:
    out: Path = args.out.absolute()
    demo = EditsDemo()
    train_starts(out, args.seeds, demo)
    # every=0: evaluate only at the start and at the end. The rows need no other evaluation.
    variants = {
        name: Variant(title, RECIPES / f"{name}.yaml", data=demo.rl_data, every=0) for name, title in TITLES.items()
    }
    runs = [
        StudyRun(f"{name}_{seed}", variant, seed, seed, tuple(demo.rl_overrides(out)))
        for name, variant in variants.items()
        for seed in args.seeds
    ]
    train_all(out, runs, args.jobs)
    evaluations = {run.name: [rows for _, rows in load_edits(out / run.name).values()] for run in runs}
    rows = [result_row("SFT", run, evaluations[run.name][0]) for run in runs if run.variant == variants["nft"]]
    rows += [result_row(run.variant.title, run, evaluations[run.name][-1]) for run in runs]
    about = report.describe_machine() | {"runs": list_revisions(out, runs)}
    path = report.write_results(args.name, about, rows)
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n")


def result_row(title: str, run: StudyRun, rows: Sequence[EditRow]) -> dict[str, Any]:
    """rows: samples of an evaluation."""
    return {"model": title, "seed": run.seed} | asdict(score_edits(rows))


if __name__ == "__main__":
    sys.exit(main())
