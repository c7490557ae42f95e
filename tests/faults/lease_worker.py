"""`python lease_worker.py ENDPOINT NAME JOURNAL [MODULE.NAME=VALUE ...]`: a worker process for the tests of pipes.

A row {"i": i, "seconds": s, "of": n} takes so long, in the worker of that name or (None) in all, and gives {"i": i} and
a tensor of i + 1 times i. It notes in JOURNAL when it begins and ends a task, leaves when its stdin is closed or with
SIGTERM, and then prints how many reports the hub has not acknowledged. The words that follow set constants of
wfm_ds.transport.
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
