"""The frame of a worker process of a service: it starts, says that it is ready, works and ends.

Started by scorers.py; settings come as one line of JSON on stdin. Stdin stays open behind that line: its end of file
means that the supervisor is gone. Stdout carries one line of status, {"ready": true} or {"error": ...}; whatever else
is printed goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wfm_ds.errors import UserError
from wfm_ds.pipes.worker import HandleBatch, LeaseWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLoop:
    """The arguments of LeaseWorker.run_batches, and the time after which a batch is taken to hang."""

    handle: HandleBatch
    stall_s: float
    max_rows: int = 1
    max_wait_s: float = 0.0


def run(load: Callable[[Mapping[str, Any]], WorkerLoop]) -> int:
    """Work until told to stop. Return the exit status: 0, or 2 if `load`, which gets the settings, has raised."""
    status_fd = os.dup(1)  # not inherited by what a model starts
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which closes stdin
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        settings = json.loads(stdin.readline())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {settings['name']} %(levelname)s %(message)s")
    try:
        work = load(settings)
    except Exception as error:  # the border of foreign code: it becomes the service's one-line error
        log.exception("%s cannot start", settings["name"])
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        _tell(status_fd, {"error": reason})
        return 2
    _tell(status_fd, {"ready": True})
    worker = LeaseWorker(
        settings["endpoint"],
        worker=settings["worker"],
        name=settings["name"],
        kinds=[settings["kind"]],
        credit=work.max_rows,
        parent_fd=0,
        watchdog_s=work.stall_s + 10.0,
    )
    worker.run_batches(work.handle, max_rows=work.max_rows, max_wait_s=work.max_wait_s)
    return 0


def _tell(status_fd: int, status: Mapping[str, Any]) -> None:
    os.write(status_fd, json.dumps(status).encode() + b"\n")
