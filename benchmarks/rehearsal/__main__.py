"""Run GPU code paths on a machine without a GPU: `python -m benchmarks.rehearsal [FAMILY ...]`.

Prints what each run completed, and the waits of the host where it must only queue work, with their origin. Without
families, a selection of runs of all families. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import report

MARK = "RESULT "


def rehearse_in_subprocess(family: str, ranks: int, runs: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each run. A subprocess, because DeepSpeed stores its device and ranks globally."""
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--case", family, str(ranks), *map(str, runs)]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the rehearsal of {family} failed:\n{done.stderr[-6000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.rpartition(MARK)[2])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.rehearsal.families import RUNS, SELECTION, rehearse_runs

    parser = argparse.ArgumentParser(prog="benchmarks.rehearsal", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rehearse all runs of these families")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        family, ranks, *indices = args.case
        sys.stdout.write(MARK + json.dumps(rehearse_runs(family, int(ranks), [*map(int, indices)])))
        return 0
    cases = [(name, ranks, range(len(runs))) for name in args.families for ranks, runs in RUNS.items()] or SELECTION
    failed = False
    for family, ranks, runs in cases:
        rows = rehearse_in_subprocess(family, ranks, runs)
        stacks = [stack for row in rows for stack in row.pop("stacks")]
        failed = failed or any(row["rehearsed"].startswith("FAILED") for row in rows)
        sys.stdout.write("\n\n".join([report.format_table(rows), *stacks]) + "\n\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
