"""The pages of a day: a table of the performance of each run, and all goals, lines and rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.goals import check_goals

Record = dict[str, Any]
Row = dict[str, Any]
PAGE, TABLE, DATA = "day.md", "performance.md", "day.json"
REHEARSAL = "**A rehearsal with tiny pipelines: the numbers do not represent a GPU.**"


def write_pages(records: Sequence[Record], machines: Sequence[Mapping[str, Any]], out: Path, *, tiny: bool) -> None:
    """Write the pages and the data of a day. machines: descriptions of the machines of the calls, without repeats."""
    about = [", ".join(f"{key} {value}" for key, value in machine.items()) for machine in machines]
    head = [*([REHEARSAL] if tiny else []), *about]
    verdicts = check_goals(
        {record["line"]: record["rows"] for record in records}, {r["line"]: r["status"] for r in records}
    )
    table = performance_rows(records)
    lines = [{key: r.get(key) for key in ("call", "group", "line", "status", "s", "said")} for r in records]
    write_page(out / TABLE, ["# Performance on one GPU", *head, report.format_table(table)])
    parts = ["# A day on a GPU", *head, "## Performance", report.format_table(table)]
    parts += ["## Goals", report.format_table(verdicts), "## Lines", report.format_table(lines)]
    for record in records:
        if record["rows"]:
            parts += [f"### {record['line']}", f"`{record['command']}`", report.format_table(record["rows"])]
    write_page(out / PAGE, parts)
    data = {"machines": list(machines), "goals": verdicts, "performance": table, "lines": list(records)}
    (out / DATA).write_text(json.dumps(data, indent=1) + "\n")


def write_page(file: Path, parts: Sequence[str]) -> None:
    file.write_text("\n\n".join(parts) + "\n")


def performance_rows(records: Sequence[Record]) -> list[Row]:
    """Return a row for each measured loop: throughput, seconds of a step, peak memory and MFU."""
    return [row for record in records for found in record["rows"] for row in loop_rows(found)]


def loop_rows(found: Row) -> Iterator[Row]:
    """Yield the loops of a row of `steps`, or of `against`, which also measures the published loop."""
    run = {"recipe": found.get("recipe"), "variant": found.get("variant")}
    memory = {"peak memory GiB": found.get("allocated GiB"), "MFU": found.get("MFU")}
    if "step s" in found:
        yield loop_row({**run, "loop": "wfm_ds"}, found["samples"], found["step s"], memory)
    if "ours s" in found:
        yield loop_row({**run, "loop": "wfm_ds, alternating"}, found["samples"], found["ours s"], {})
        published = {**run, "variant": "", "loop": "published loop, alternating"}
        yield loop_row(published, found["samples"], found["reference s"], {})


def loop_row(run: Row, samples: int, step_s: Mapping[str, float], memory: Row) -> Row:
    return {
        **run,
        "GPUs": 1,
        "samples per step": samples,
        "samples per GPU and second": samples / step_s["median"],
        "s per step": dict(step_s),
        **{"peak memory GiB": None, "MFU": None},
        **memory,
    }
