"""Measurements for one GPU in order of their value: `python -m benchmarks.gpu day --minutes 30 [--one-call] [--tiny]`.

The lines (calls.py) run in calls of at most ten minutes, and in at most `--minutes` in total. Each line is a separate
process with its own time limit, and the next line starts even after a failure. After each line, the pages and an
archive of all results are written. Lines with a result are not run again, so a day can be split into commands
(`--one-call`) and moved between machines (`--continue-from ARCHIVE`).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.archive import pack_results, unpack_results
from benchmarks.gpu.calls import CALL_S, SPARE_S, CallLine, Plan, plan_day
from benchmarks.gpu.goals import measurable_goals
from benchmarks.gpu.line_process import Record, run_line
from benchmarks.gpu.machine import PACKAGES
from benchmarks.gpu.pages import DATA, write_pages
from wfm_ds.errors import UserError

CALLS = "calls.json"  # seconds and machine of each call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30, help="time of all calls together (default: 30)")
    parser.add_argument("--one-call", action="store_true", help="run one call of at most ten minutes")
    parser.add_argument("--continue-from", type=Path, metavar="ARCHIVE", help="archive of an earlier call")
    parser.add_argument("--again", action="store_true", help="also run lines that failed or were killed")
    parser.add_argument("--plan", action="store_true", help="only print the lines of each call, at their time limits")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: all lines with tiny pipelines, also on a CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu_day"), help="folder for results (default: outputs/gpu_day)"
    )
    parser.add_argument("--archive", type=Path, help="file for all results (default: the folder's name and .tar.gz)")
    parser.add_argument(
        "--models", type=Path, help="folder for pipelines of released size (default: a temporary folder)"
    )
    parser.add_argument("--write", action="store_true", help="also write the tables to benchmarks/results/")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    models = (args.models or Path(tempfile.gettempdir()) / "wfm_gpu_day").resolve()
    plan = plan_day(models, tiny=args.tiny)
    if args.plan:
        return plan_rows(plan, args.minutes)
    if args.continue_from is not None:
        unpack_results(args.continue_from, args.out, summaries=(CALLS, DATA))
    args.out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    archive = args.archive or args.out.with_name(args.out.name + ".tar.gz")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running line, too
    day = Day(plan, args.out, archive, tiny=args.tiny)
    if args.again:
        day.forget_failures()
    while day.run_call(60 * args.minutes) and not args.one_call:
        pass
    day.save()
    if args.write:
        day.write_results()
    return [{key: r.get(key) for key in ("call", "group", "line", "status", "s", "said")} for r in day.records()]


def plan_rows(plan: Plan, minutes: float) -> list[dict[str, Any]]:
    """Return a row for each line of each call, with the goals that can be checked from this line on."""
    rows: list[dict[str, Any]] = []
    planned, done, checked = {line.name for line in plan.lines}, set[str](), set[str]()
    for number, lines in enumerate(plan.schedule(minutes), 1):
        for line in lines:
            done.add(line.name)
            goals = [goal for goal in measurable_goals(done, planned) if goal not in checked]
            checked.update(goals)
            row = {"call": number, "group": line.group, "line": line.name, "at most s": line.limit_s}
            rows.append(row | {"goals": "; ".join(goals)})
    return rows


class Day:
    """The results of a day in a folder."""

    def __init__(self, plan: Plan, out: Path, archive: Path, *, tiny: bool) -> None:
        self.plan, self.out, self.archive, self.tiny = plan, out, archive, tiny
        file = out / CALLS
        self.calls: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def run_call(self, budget_s: float) -> bool:
        """Run the next lines for at most ten minutes. Return False if no line fits into the rest of the budget."""
        began, spent_s = time.monotonic(), sum(call["s"] + SPARE_S for call in self.calls)
        call_s = min(CALL_S, budget_s - spent_s)
        call: dict[str, Any] = {"s": 0.0, "lines": [], "machine": describe_versions()}
        while (line := self.choose_line(call_s - SPARE_S - (time.monotonic() - began))) is not None:
            number = len(self.calls) + (not call["lines"])
            print_status(f"call {number}, {line.group or 'preparation'}: {line.name}")
            record = run_line(line, self.file(line).with_suffix(".log"), self.out / "caches", forked=self.tiny)
            print_status(f"    {record['status']} after {record['s']:.0f} s: {record['said']}")
            write_json(self.file(line), {"call": number, "line": line.name, **record})
            if not call["lines"]:
                self.calls.append(call)
            call["lines"].append(line.name)
            call["s"] = time.monotonic() - began
            self.save()
        return bool(call["lines"])

    def choose_line(self, left_s: float) -> CallLine | None:
        done = {line.name for line in self.plan.lines if self.file(line).exists()}
        made = {line.name for line in self.plan.pipelines if line.makes is not None and line.makes.exists()}
        failed = {line.name for line in self.plan.pipelines if line.name not in made and self.is_tried(line)}
        unusable = {line.name for line in self.plan.lines if line.pipeline in failed}
        return self.plan.choose_line(done | unusable, made, left_s)

    def is_tried(self, pipeline: CallLine) -> bool:
        """Return whether this pipeline failed, rather than being lost with an earlier machine."""
        file = self.file(pipeline)
        return file.exists() and json.loads(file.read_text())["status"] != "done"

    def forget_failures(self) -> None:
        for line in (*self.plan.lines, *self.plan.pipelines):
            if (file := self.file(line)).exists() and json.loads(file.read_text())["status"] != "done":
                file.unlink()

    def file(self, line: CallLine) -> Path:
        return self.out / f"{re.sub(r'[^a-z0-9.]+', '-', line.name.lower())}.json"

    def records(self) -> list[Record]:
        """Return the records of all lines, in order. Lines without a result are marked as not run."""
        found = []
        for line in (*self.plan.pipelines, *self.plan.lines):
            file = self.file(line)
            not_run = {"line": line.name, "group": line.group, "status": "not run", "rows": []}
            found.append(json.loads(file.read_text()) if file.exists() else not_run)
        return found

    def machines(self) -> list[dict[str, Any]]:
        """Return the machines of all calls, without repeats."""
        return [call["machine"] for i, call in enumerate(self.calls) if call["machine"] not in self._earlier(i)]

    def _earlier(self, i: int) -> list[Mapping[str, Any]]:
        return [call["machine"] for call in self.calls[:i]]

    def save(self) -> None:
        """Write the pages and the archive."""
        write_json(self.out / CALLS, self.calls)
        write_pages(self.records(), self.machines(), self.out, tiny=self.tiny)
        for name in pack_results(self.out, self.archive):
            print_status(f"{self.archive}: {name} does not fit and is left out")

    def write_results(self) -> None:
        if not self.calls:
            raise UserError(f"{self.out} has no results to write")
        rows = [{"line": r["line"], **row} for r in self.records() for row in r["rows"]]
        goals = json.loads((self.out / DATA).read_text())["goals"]
        report.write_results("day", self.calls[-1]["machine"], [*goals, *rows])


def describe_versions() -> dict[str, Any]:
    """Describe the machine and the versions of the packages that results depend on."""
    return report.describe_machine() | {name: report.package_version(name) for name in PACKAGES}


def write_json(file: Path, content: object) -> None:
    """Write a file atomically, because the machine may be taken back at any time."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


def print_status(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
