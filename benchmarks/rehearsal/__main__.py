"""Rehearse GPU runs on a machine without a GPU: `python -m benchmarks.rehearsal`.

Prints what a step does to the device (`--steps`), and what every family was taken through (`--families`).
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


def step(name: str) -> dict[str, Any]:
    from benchmarks.rehearsal import steps

    record = steps.counted(name)
    return {"rows": steps.rows(name, record), "sites": steps.sites(record)}


def family(name: str, ranks: str, *runs: str) -> dict[str, Any]:
    from benchmarks.rehearsal import families

    outcomes = families.rehearse(name, int(ranks), [*map(int, runs)])
    notes = [f"{o.label}: {text}" for o in outcomes for text in (*o.warnings, *o.stacks)]
    return {"rows": [o.row() for o in outcomes], "notes": notes}


def elsewhere(kind: str, *case: str) -> dict[str, Any]:
    """Rehearse one case in a process of its own: DeepSpeed keeps what it was told of its device and its ranks."""
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--case", kind, *case]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the rehearsal of {' '.join(case)} failed:\n{done.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(done.stdout.rpartition(MARK)[2])
    return found


MARK = "RESULT "


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.rehearsal.families import COVERING, RUNS
    from benchmarks.rehearsal.steps import STEPS
    from wfm_ds.models.tiny import FAMILIES

    parser = argparse.ArgumentParser(prog="benchmarks.rehearsal", description=__doc__)
    parser.add_argument("--steps", nargs="*", choices=[*STEPS], help="count steps: these, or all")
    parser.add_argument(
        "--families", nargs="*", choices=[*FAMILIES], help="rehearse families: all runs of these, or a covering few"
    )
    parser.add_argument("--details", action="store_true", help="also print warnings, and where events come from")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results/")
    parser.add_argument("--rest", action="store_true", help="of families, only what today's file in results/ lacks")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        kind, *case = args.case
        sys.stdout.write(MARK + json.dumps(step(*case) if kind == "step" else family(*case)))
        return 0
    everything = args.steps is None and args.families is None
    names = args.steps or (STEPS if everything or args.steps is not None else [])
    show("rehearsal-steps", [("step", name) for name in names], args)
    cases: Iterable[tuple[str, int, Iterable[int]]] = ()
    if args.families:
        cases = ((name, ranks, range(len(runs))) for name in args.families for ranks, runs in RUNS.items())
    elif everything or args.families is not None:
        cases = COVERING
    before = written("rehearsal-families") if args.rest else []
    todo = [
        (name, ranks, [i for i in runs if label(name, ranks, i) not in map(labelled, before)])
        for name, ranks, runs in cases
    ]
    asked = [("family", name, str(ranks), *map(str, runs)) for name, ranks, runs in todo if runs]
    rows = show("rehearsal-families", asked, args, before)
    return int(any(row["rehearsed"].startswith("FAILED") for row in rows))


def written(stage: str) -> list[dict[str, Any]]:
    """Return the rows that stand in today's file, each with its revision."""
    file = report.path(stage, report.machine())
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    return [row | {"revision": row.get("revision", result["machine"]["revision"])} for row in result["rows"]]


def label(name: str, ranks: int, index: int) -> tuple[Any, ...]:
    """Tell the run from others, as `labelled` does for its row."""
    from benchmarks.rehearsal.families import RUNS

    run = RUNS[ranks][index]
    return name, ranks, run.name, run.config, run.sequence_parallel


def labelled(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("family", "ranks", "algorithm", "DeepSpeed", "sequence parallel"))


def show(
    stage: str, cases: Sequence[tuple[str, ...]], args: argparse.Namespace, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Rehearse the cases, one after the other, and print a table of each; return all rows, after those of `before`."""
    rows = list(before)
    about = report.machine()  # before results change the checkout
    for case in cases:
        found = elsewhere(*case)
        rows += [row | {"revision": about["revision"]} for row in found["rows"]]
        sys.stdout.write(report.table(found["rows"]) + "\n\n")
        if args.details:
            if found.get("sites"):
                sys.stdout.write(report.table(found["sites"]) + "\n\n")
            sys.stdout.write("".join(f"{note}\n" for note in found.get("notes", ())))
        sys.stdout.flush()
        if args.write:  # after each case: together they take an hour
            report.write(stage, about, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
