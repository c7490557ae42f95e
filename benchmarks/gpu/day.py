"""All calls of a day on one GPU, in order: `python -m benchmarks.gpu day [--call N] [--again] [--tiny]`.

Each line of a call is a separate process. It is killed at its time limit or when the time of its call is over, and the
next line starts even after a failure. The result of a line is a JSON file in `--out`. Lines with a result are not run
again, so a day can be split into commands of ten minutes, on machines that keep only this folder. At the end, its files
`day.md` and `day.json` contain the goals, the results and the rows of every line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu import runs
from benchmarks.gpu.calls import CALL_S, Call, CallLine, plan_calls
from benchmarks.gpu.goals import check_goals

ENOUGH_S = 10.0  # do not start a line with less time
Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--call", type=int, help="run only this call (1, 2, ...)")
    parser.add_argument("--again", action="store_true", help="also run lines that have a result")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: all lines with tiny pipelines, also on a CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu_day"), help="folder for results (default: outputs/gpu_day)"
    )
    parser.add_argument(
        "--models", type=Path, help="folder for pipelines of released size (default: a temporary folder)"
    )
    parser.add_argument("--write", action="store_true", help="also write the table to benchmarks/results/")


def run(args: argparse.Namespace) -> list[Record]:
    models = (args.models or Path(tempfile.gettempdir()) / "wfm_gpu_day").resolve()
    planned = plan_calls(models, tiny=args.tiny)
    if args.call is not None and not 1 <= args.call <= len(planned):
        raise SystemExit(f"--call: must be 1 to {len(planned)}")
    args.out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    for number, call in enumerate(planned, 1):
        if args.call in (None, number):
            run_call(call, number, args.out, again=args.again)
    records = [record for number, call in enumerate(planned, 1) for record in load_records(call, number, args.out)]
    return write_report(records, args.out, tiny=args.tiny, write=args.write)


def run_call(call: Call, number: int, out: Path, *, again: bool) -> None:
    """Run the lines of a call that have no result yet, within its time."""
    ends = time.monotonic() + CALL_S
    for line in call.lines:
        file = result_file(out, number, line)
        if (line.makes.exists() if line.makes else file.exists()) and not (again and line.makes is None):
            continue
        left = ends - time.monotonic()
        if left < ENOUGH_S:
            print_status(f"call {number}: no time left for {line.name}; run the call again")
            return
        print_status(f"call {number}, {call.title}: {line.name}")
        record = run_line(line, file.with_suffix(".log"), min(line.limit_s, left))
        file.write_text(json.dumps({"call": number, "line": line.name, **record}, indent=1) + "\n")
        print_status(f"    {record['status']} after {record['s']:.0f} s: {record['said']}")


def result_file(out: Path, number: int, line: CallLine) -> Path:
    return out / f"{number}-{re.sub(r'[^a-z0-9.]+', '-', line.name.lower())}.json"


def load_records(call: Call, number: int, out: Path) -> list[Record]:
    """Return the records of a call's lines, in order. Lines without a result are marked as not run."""
    found = []
    for line in call.lines:
        file = result_file(out, number, line)
        status = "made before" if line.makes is not None and line.makes.exists() else "not run"
        not_run = {"call": number, "line": line.name, "status": status, "rows": []}
        found.append(json.loads(file.read_text()) if file.exists() else not_run)
    return found


def run_line(line: CallLine, log: Path, limit_s: float) -> Record:
    """Run a line and return its record."""
    with tempfile.TemporaryDirectory(prefix="wfm-line-") as temporary, log.open("w") as output:
        rows = Path(temporary) / "rows.json"
        command = [*line.command, *(["--json", str(rows)] if line.rows else [])]
        began = time.monotonic()
        status = wait_for_exit(command, output, limit_s)
        seconds = time.monotonic() - began
        found = json.loads(rows.read_text()) if rows.exists() else []
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    errors = [row["error"] for row in found if "error" in row]
    said = errors[0] if errors else lines[-1].strip() if lines else ""
    shown = "" if status == "done" and line.rows else said[:200]
    return {"status": status, "s": seconds, "said": shown, "command": " ".join(command[1:]), "rows": found}


def wait_for_exit(command: Sequence[str], output: Any, limit_s: float) -> str:
    """Return `done`, or a text about another end. At the limit, the process is killed with all its children."""
    environment = {**os.environ, **({} if torch.cuda.is_available() else {"WFM_TEST_DEVICE": "cpu"})}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=runs.ROOT, env=environment, start_new_session=True
    )
    try:
        code = process.wait(timeout=limit_s)
        return "done" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        return f"killed at its limit of {limit_s:.0f} s"
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all processes of the group have exited
        return
    finally:
        process.wait()


def write_report(records: Sequence[Record], out: Path, *, tiny: bool, write: bool) -> list[Record]:
    """Write the table, and return its lines."""
    about = report.describe_machine()
    lines = [{key: r.get(key) for key in ("call", "line", "status", "s", "said")} for r in records]
    verdicts = check_goals(
        {record["line"]: record["rows"] for record in records}, {r["line"]: r["status"] for r in records}
    )
    title = "# A rehearsal: tiny pipelines, not representative of a GPU" if tiny else "# A day on a GPU"
    parts = [title, ", ".join(f"{key} {value}" for key, value in about.items())]
    parts += ["## Goals", report.format_table(verdicts), "## Lines", report.format_table(lines)]
    for record in records:
        if record["rows"]:
            parts += [
                f"### {record['call']}: {record['line']}",
                f"`{record['command']}`",
                report.format_table(record["rows"]),
            ]
    (out / "day.md").write_text("\n\n".join(parts) + "\n")
    (out / "day.json").write_text(json.dumps({"machine": about, "goals": verdicts, "lines": list(records)}, indent=1))
    if write:
        report.write_results(
            "day", about, [*verdicts, *({"line": r["line"], **row} for r in records for row in r["rows"])]
        )
    print_status(report.format_table(verdicts))
    return lines


def print_status(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
