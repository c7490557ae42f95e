"""result.json: how a run ended. Written last, by rank 0; a folder without it holds a run that is not over."""

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
"""All steps done; stopped on request after saving; ended by an error."""


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
    """Write `output_dir/result.json` and return its path. The file is complete or absent.

    `step` is the last one done, `metrics` the last values by tag (not finite: null), `artifacts` what the run left
    behind by kind, as paths. `started` must know its time zone. `message` says why a run failed, `storage` what became
    of its copies, as JSON.
    Raises ValueError on an unknown status, OSError if the folder cannot be written.
    """
    if status not in STATUSES:
        raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
    finished = datetime.datetime.now(datetime.UTC)
    result: dict[str, Any] = {
        "status": status,
        "step": step,
        "message": message,
        "started": _iso(started),
        "finished": _iso(finished),
        "seconds": round((finished - started).total_seconds(), 3),
        "metrics": {tag: finite_or_none(value) for tag, value in metrics.items()},
        "artifacts": dict(artifacts),
        **({} if storage is None else {"storage": dict(storage)}),
    }
    path = output_dir / "result.json"
    atomic.write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
    return path


def _iso(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a training loop: `preempted` when it stopped on request at a step boundary."""

    status: Literal["finished", "preempted"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
