"""All calls of a day on one GPU, in order: `python -m benchmarks.gpu day [--call N] [--again] [--tiny]`.

Each line of a call is a process of its own, killed at its limit or when its call's time is up; however it ends, the
next one begins. A line's result is a JSON file in `--out`: where that exists the line is not run again, so
that a day may be cut into commands of ten minutes, on machines that forget everything but that folder. At the end
`day.md` and `day.json` there have everything: the goals beside what was found, and the rows of every line.
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
from benchmarks.gpu.calls import CALL_S, Call, Line, calls
from benchmarks.gpu.goals import judged

ENOUGH_S = 10.0  # less than this is not worth a line's start
Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--call", type=int, help="this one only, from 1")
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: every line, on tiny pipelines, on a CPU too")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu_day"), help="for results (default: outputs/gpu_day)"
    )
    parser.add_argument("--models", type=Path, help="for pipelines of released size (default: in the temporary folder)")
    parser.add_argument("--write", action="store_true", help="keep the table in benchmarks/results/ too")


def run(args: argparse.Namespace) -> list[Record]:
    models = (args.models or Path(tempfile.gettempdir()) / "wfm_gpu_day").resolve()
    planned = calls(models, tiny=args.tiny)
    if args.call is not None and not 1 <= args.call <= len(planned):
        raise SystemExit(f"there are the calls 1 to {len(planned)}")
    args.out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    for number, call in enumerate(planned, 1):
        if args.call in (None, number):
            do(call, number, args.out, again=args.again)
    records = [record for number, call in enumerate(planned, 1) for record in known(call, number, args.out)]
    return finished(records, args.out, tiny=args.tiny, write=args.write)


def do(call: Call, number: int, out: Path, *, again: bool) -> None:
    """The lines of a call that have no result yet, within its time."""
    ends = time.monotonic() + CALL_S
    for line in call.lines:
        file = result_file(out, number, line)
        if (line.makes.exists() if line.makes else file.exists()) and not (again and line.makes is None):
            continue
        left = ends - time.monotonic()
        if left < ENOUGH_S:
            say(f"call {number}: no time left for {line.name}: run the call again")
            return
        say(f"call {number}, {call.title}: {line.name}")
        record = performed(line, file.with_suffix(".log"), min(line.limit_s, left))
        file.write_text(json.dumps({"call": number, "line": line.name, **record}, indent=1) + "\n")
        say(f"    {record['status']} after {record['s']:.0f} s: {record['said']}")


def result_file(out: Path, number: int, line: Line) -> Path:
    return out / f"{number}-{re.sub(r'[^a-z0-9.]+', '-', line.name.lower())}.json"


def known(call: Call, number: int, out: Path) -> list[Record]:
    """The records of a call's lines, in order; one that was not run is named."""
    found = []
    for line in call.lines:
        file = result_file(out, number, line)
        status = "made before" if line.makes is not None and line.makes.exists() else "not run"
        not_run = {"call": number, "line": line.name, "status": status, "rows": []}
        found.append(json.loads(file.read_text()) if file.exists() else not_run)
    return found


def performed(line: Line, log: Path, limit_s: float) -> Record:
    """Run a line and say how it ended."""
    with tempfile.TemporaryDirectory(prefix="wfm-line-") as temporary, log.open("w") as output:
        rows = Path(temporary) / "rows.json"
        command = [*line.command, *(["--json", str(rows)] if line.rows else [])]
        began = time.monotonic()
        status = ended(command, output, limit_s)
        seconds = time.monotonic() - began
        found = json.loads(rows.read_text()) if rows.exists() else []
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
    errors = [row["error"] for row in found if "error" in row]
    said = errors[0] if errors else lines[-1].strip() if lines else ""
    shown = "" if status == "done" and line.rows else said[:200]
    return {"status": status, "s": seconds, "said": shown, "command": " ".join(command[1:]), "rows": found}


def ended(command: Sequence[str], output: Any, limit_s: float) -> str:
    """`done`, or how else the process ended; at its limit it is killed with all that it started."""
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
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Its children too: the group is the process's own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        return
    finally:
        process.wait()


def finished(records: Sequence[Record], out: Path, *, tiny: bool, write: bool) -> list[Record]:
    """Write the table, and return the lines of it."""
    about = report.machine()
    lines = [{key: r.get(key) for key in ("call", "line", "status", "s", "said")} for r in records]
    verdicts = judged({record["line"]: record["rows"] for record in records}, {r["line"]: r["status"] for r in records})
    title = "# A rehearsal: tiny pipelines, whose numbers say nothing about a GPU" if tiny else "# A day on a GPU"
    parts = [title, ", ".join(f"{key} {value}" for key, value in about.items())]
    parts += ["## Goals", report.table(verdicts), "## Lines", report.table(lines)]
    for record in records:
        if record["rows"]:
            parts += [f"### {record['call']}: {record['line']}", f"`{record['command']}`", report.table(record["rows"])]
    (out / "day.md").write_text("\n\n".join(parts) + "\n")
    (out / "day.json").write_text(json.dumps({"machine": about, "goals": verdicts, "lines": list(records)}, indent=1))
    if write:
        report.write("day", about, [*verdicts, *({"line": r["line"], **row} for r in records for row in r["rows"])])
    say(report.table(verdicts))
    return lines


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
