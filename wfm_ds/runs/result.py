"""Writes result.json, the outcome of a run. Rank 0 writes this file last, so a run without it is unfinished."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

STATUSES = ("finished", "preempted", "failed")
"""`finished`: all steps are complete. `preempted`: the run saved a checkpoint and stopped on request.

`failed`: an error ended the run.
"""


def write_result(
    output_dir: Path,
    *,
    status: str,
    step: int,
    metrics: Mapping[str, float],
    artifacts: Mapping[str, str],
    started: datetime.datetime,
    message: str = "",
    storage: Mapping[str, Any] | None = None,
) -> Path:
    """Write `output_dir/result.json` atomically and return its path.

    step: last completed step. metrics: last value of each metric; non-finite values become null.
    artifacts: {kind: path} of the run's output. started: start time with time zone.
    message: reason of a failure, or a warning.
    storage: which files are missing in S3. None: the run has no S3 storage.
    Raises ValueError for an unknown status, and OSError if the folder cannot be written.
    """
    if status not in STATUSES:
        raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
    finished = datetime.datetime.now(datetime.UTC)
    result: dict[str, Any] = {
        "status": status,
        "step": step,
        "message": message,
        "started": _format_time(started),
        "finished": _format_time(finished),
        "seconds": round((finished - started).total_seconds(), 3),
        "metrics": {tag: finite_or_none(value) for tag, value in metrics.items()},
        "artifacts": dict(artifacts),
        **({} if storage is None else {"storage": dict(storage)}),
    }
    path = output_dir / "result.json"
    atomic.write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
    return path


def _format_time(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a training loop. The status `preempted` means that a stop request ended the run after a step."""

    status: Literal["finished", "preempted"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""  # warning about the result
