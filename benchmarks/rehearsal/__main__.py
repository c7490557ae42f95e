"""Run GPU code paths on a machine without a GPU: `python -m benchmarks.rehearsal`.

Prints the device operations of a step (`--steps`), and the operations that every family completed (`--families`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import report


def rehearse_step(name: str) -> dict[str, Any]:
    from benchmarks.rehearsal import steps

    record = steps.count_step(name)
    return {"rows": steps.step_rows(name, record), "sites": steps.list_sites(record)}


def rehearse_family(name: str, ranks: str, *runs: str) -> dict[str, Any]:
    from benchmarks.rehearsal import families

    outcomes = families.rehearse_runs(name, int(ranks), [*map(int, runs)])
    notes = [f"{o.label}: {text}" for o in outcomes for text in (*o.warnings, *o.stacks)]
    return {"rows": [o.as_row() for o in outcomes], "notes": notes}


def rehearse_in_subprocess(kind: str, *case: str) -> dict[str, Any]:
    """Run one case in a subprocess, because DeepSpeed stores its device and ranks globally."""
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--case", kind, *case]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the rehearsal of {' '.join(case)} failed:\n{done.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(done.stdout.rpartition(MARK)[2])
    return found


MARK = "RESULT "


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.rehearsal.families import RUNS, SELECTION
    from benchmarks.rehearsal.steps import STEPS
    from wfm_ds.models.tiny import FAMILIES

    parser = argparse.ArgumentParser(prog="benchmarks.rehearsal", description=__doc__)
    parser.add_argument("--steps", nargs="*", choices=[*STEPS], help="count steps: the given ones, or all")
    parser.add_argument(
        "--families",
        nargs="*",
        choices=[*FAMILIES],
        help="rehearse families: all runs of the given ones, or a selection",
    )
    parser.add_argument("--details", action="store_true", help="also print warnings, and the origin of events")
    parser.add_argument("--write", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument(
        "--rest", action="store_true", help="only families that today's file in results/ does not contain"
    )
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        kind, *case = args.case
        sys.stdout.write(MARK + json.dumps(rehearse_step(*case) if kind == "step" else rehearse_family(*case)))
        return 0
    everything = args.steps is None and args.families is None
    names = args.steps or (STEPS if everything or args.steps is not None else [])
    rehearse_cases("rehearsal-steps", [("step", name) for name in names], args)
    cases: Iterable[tuple[str, int, Iterable[int]]] = ()
    if args.families:
        cases = ((name, ranks, range(len(runs))) for name in args.families for ranks, runs in RUNS.items())
    elif everything or args.families is not None:
        cases = SELECTION
    before = load_rows("rehearsal-families") if args.rest else []
    todo = [
        (name, ranks, [i for i in runs if run_label(name, ranks, i) not in map(row_label, before)])
        for name, ranks, runs in cases
    ]
    requested = [("family", name, str(ranks), *map(str, runs)) for name, ranks, runs in todo if runs]
    rows = rehearse_cases("rehearsal-families", requested, args, before)
    return int(any(row["rehearsed"].startswith("FAILED") for row in rows))


def load_rows(stage: str) -> list[dict[str, Any]]:
    """Return the rows of today's results file, each with its revision."""
    file = report.result_path(stage, report.describe_machine())
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    return [row | {"revision": row.get("revision", result["machine"]["revision"])} for row in result["rows"]]


def run_label(name: str, ranks: int, index: int) -> tuple[Any, ...]:
    """Return a key of a run, equal to `row_label` of its row."""
    from benchmarks.rehearsal.families import RUNS

    run = RUNS[ranks][index]
    return name, ranks, run.name, run.config, run.sequence_parallel


def row_label(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("family", "ranks", "algorithm", "DeepSpeed", "sequence parallel"))


def rehearse_cases(
    stage: str, cases: Sequence[tuple[str, ...]], args: argparse.Namespace, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Run the cases one after another, and print a table of each. Return `before` and all new rows."""
    rows = list(before)
    about = report.describe_machine()  # before the results change the checkout
    for case in cases:
        found = rehearse_in_subprocess(*case)
        rows += [row | {"revision": about["revision"]} for row in found["rows"]]
        sys.stdout.write(report.format_table(found["rows"]) + "\n\n")
        if args.details:
            if found.get("sites"):
                sys.stdout.write(report.format_table(found["sites"]) + "\n\n")
            sys.stdout.write("".join(f"{note}\n" for note in found.get("notes", ())))
        sys.stdout.flush()
        if args.write:  # after each case, because all cases take an hour
            report.write_results(stage, about, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
