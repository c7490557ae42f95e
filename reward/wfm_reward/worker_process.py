"""Main function of the worker processes of a reward service.

A worker reads its settings from stdin as one line of JSON. End of file on stdin means that the service has exited. The
worker writes one status line to stdout, {"ready": true} or {"error": ...}. All other output goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wfm_ds.errors import describe_error
from wfm_ds.program import ignore_job_signals
from wfm_ds.transport.worker import BatchHandler, LeaseWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Arguments of LeaseWorker.run_batches, and the number of seconds after which a batch counts as hung."""

    handle_batch: BatchHandler
    stall_s: float
    max_rows: int = 1
    max_wait_s: float = 0.0


def run_worker(load_handler: Callable[[Mapping[str, Any]], WorkerSetup]) -> int:
    """Process tasks until the service stops the worker. Returns 0, or 2 if `load_handler` raises an error.

    load_handler: function that receives the settings from stdin and loads the model.
    """
    status_fd = os.dup(1)  # child processes of a model do not inherit it
    os.dup2(2, 1)
    ignore_job_signals()  # the service receives them too, and ends this process by closing stdin
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        settings = json.loads(stdin.readline())
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {settings['name']} %(levelname)s %(message)s")
    try:
        setup = load_handler(settings)
    except Exception as error:  # third-party code may raise anything
        log.exception("%s cannot start", settings["name"])
        _write_status(status_fd, {"error": describe_error(error)})
        return 2
    _write_status(status_fd, {"ready": True})
    worker = LeaseWorker(
        settings["endpoint"],
        worker=settings["worker"],
        name=settings["name"],
        kinds=[settings["kind"]],
        credit=setup.max_rows,
        parent_fd=0,
        watchdog_s=setup.stall_s + 10.0,
    )
    worker.run_batches(setup.handle_batch, max_rows=setup.max_rows, max_wait_s=setup.max_wait_s)
    return 0


def _write_status(status_fd: int, status: Mapping[str, Any]) -> None:
    os.write(status_fd, json.dumps(status).encode() + b"\n")
