"""Write results: one JSON file for each run with its machine, and one page with the tables of all results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
WRITTEN = ("benchmarks/results", "docs/images")


def describe_machine() -> dict[str, Any]:
    """Describe the machine that a number was measured on."""
    about: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "revision": _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if torch.cuda.is_available():
        about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return about


def _git_revision() -> str:
    """Return the commit, with `-dirty` if tracked files differ, except files that benchmarks write."""
    described = _run_git("describe", "--always")
    if described.returncode:
        return "unknown"
    changed = _run_git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":(exclude){w}" for w in WRITTEN))
    return described.stdout.strip() + ("-dirty" if changed.stdout else "")


def _run_git(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(RESULTS.parent.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def write_results(stage: str, about: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write results/<date>-<gpu or cpu>-<stage>.json, and rewrite the page of all results. more: further keys,
    only for the JSON file."""
    file = result_path(stage, about)
    file.write_text(json.dumps({"machine": about, "rows": rows} | more, indent=1) + "\n")
    pages = [_result_section(file) for file in sorted(RESULTS.glob("*.json"))]
    (RESULTS / "README.md").write_text("# Results\n\nWritten by `benchmarks/report.py`.\n" + "".join(pages))
    return file


def print_results(stage: str, rows: list[dict[str, Any]], *, write: bool, **about: Any) -> None:
    """Print a table, and with `write` also write it as the results of a stage. about: more about the machine."""
    sys.stdout.write(format_table(rows) + "\n")
    if write:
        write_results(stage, describe_machine() | about, rows)


def result_path(stage: str, about: dict[str, Any]) -> Path:
    """Return the results' file of a stage for this machine and date."""
    device = re.sub(r"[^a-z0-9]+", "-", about.get("gpu", "cpu").lower())
    return RESULTS / f"{about['date']}-{device}-{stage}.json"


def _result_section(file: Path) -> str:
    result = json.loads(file.read_text())
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"\n## {file.stem}\n\n{about}\n\n{format_table(result['rows'])}\n"


def summarize(values: Iterable[float]) -> dict[str, float]:
    """Return the cell of a table for repeated measurements."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table. The columns are the keys of all rows, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *[[_format_cell(row.get(c)) for c in columns] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.3g} ({value['min']:.3g}-{value['max']:.3g})"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
