"""Pass samples through the rollout broker and the reward service while processes are killed: `python -m
benchmarks.soak`.

Runs the processes of an async run without the model and the training: a host (rollout broker, supervision of rollout
workers and reward service), three rollout workers, the service with two workers for each of two rewards, and a client
that admits, fetches and releases steps of 100 samples. The id of a sample determines its pixels and scores. A seed
decides which process is killed, paused or stopped with SIGTERM. The study fails unless all of these hold:

    * every sample reaches the client once, with the correct pixels and scores;
    * broker, client and service do not grow: in their longest life, memory and descriptors of the last third equal
      those of the first third within the bounds of processes.py (checked only for 5,000 samples or more);
    * each process that received a signal is replaced or continues soon, and no process, socket or shared memory is left
      at the end.

On a failure the exit code is 1. The service is only killed as often as the trainer's supervision allows.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.soak.samples import PER_STEP
from benchmarks.soak.study import Soak, SoakError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="S", help="mean seconds between faults")
    parser.add_argument("--seconds", type=float, default=0.15, help="time of a rollout worker for each sample")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.samples <= 0 or options.samples % PER_STEP:
        parser.error(f"argument --samples: must be a multiple of {PER_STEP}, the samples of a step")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        soak = Soak(folder, options.samples, options.kill_every, options.seconds, random.Random(options.seed))
        rows = soak.run()
    except SoakError as error:
        sys.stderr.write(f"error: {error}\nthe logs are in {folder}\n")
        return 1
    shutil.rmtree(folder)
    sys.stdout.write(f"{report.format_table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
