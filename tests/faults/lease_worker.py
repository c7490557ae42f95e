"""A worker process for transport tests: `python lease_worker.py ENDPOINT NAME JOURNAL [MODULE.NAME=VALUE ...]`.

A task has one row {"i": i, "seconds": s, "of": name}. The worker sleeps s seconds if `of` is its name or None, and
returns {"i": i} and a tensor of i + 1 elements equal to i. It logs the start and end of each task to JOURNAL. It exits
when stdin closes or on SIGTERM, and then prints the number of unacknowledged reports.
MODULE.NAME=VALUE sets a constant of wfm_ds.transport.
"""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from wfm_ds.transport.worker import LeaseWorker, TaskResult


def main(endpoint, name, journal, *constants):
    for word in constants:
        where, value = word.split("=")
        module, _, constant = where.rpartition(".")
        setattr(importlib.import_module(f"wfm_ds.transport.{module}"), constant, float(value))

    def note(what, task):
        with Path(journal).open("a") as out:
            out.write(json.dumps({"what": what, "id": task.id, "worker": name, "pid": os.getpid()}) + "\n")

    def handle(task, progress):
        note("begin", task)
        (row,) = task.rows
        if row["of"] in (None, name):
            time.sleep(row["seconds"])
        note("end", task)
        return TaskResult({"i": row["i"]}, [("x", np.full(row["i"] + 1, row["i"], np.int64))])

    worker = LeaseWorker(endpoint, worker=name, name=name, kinds=["work"], parent_fd=0)
    signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
    worker.run(handle)
    sys.stdout.write(json.dumps({"unacknowledged": len(worker._reports)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
