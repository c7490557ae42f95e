"""`python -m benchmarks.soak`: samples through rollout hub and reward service while something dies every few seconds.

The processes of an async run, of which only model and training are missing: a host (rollout hub, supervision of the
rollout workers and of the reward service), three rollout workers, the service with two workers of each of two rewards,
and a client that admits, fetches and releases steps of 100 samples. A sample's pixels and scores follow from its id. A
seed draws which process is killed, stopped for a while or asked to leave. The study fails, with exit code 1 and
nothing written, unless

    * every sample comes to the client once, with the pixels and the scores that it must have;
    * hub, client and service stay flat: memory and descriptors of the last third of their longest life are, within the
      bounds of memory.py, those of the first third (of a run of at least 5,000 samples, else there is nothing to see);
    * each process that got a signal is back soon, and at the end no process, socket or shared memory is left.

The service itself is killed in the first half only, so that its memory can be seen in the second, and no more often
than the trainer's supervision allows. After every 20 faults there are none for a while, to measure the speed without
them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.samples import PER_STEP
from benchmarks.soak.study import Plan, Soak, StudyError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="S", help="seconds between faults, on average")
    parser.add_argument("--seconds", type=float, default=0.15, help="that a rollout worker takes for a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args(arguments)
    if options.samples <= 0 or options.samples % PER_STEP:
        parser.error(f"argument --samples: a multiple of {PER_STEP}, which are a step")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    plan = Plan(options.samples, options.kill_every, options.seconds, options.seed)
    try:
        figures, memory = Soak(folder, plan, say).run()
    except StudyError as error:
        sys.stderr.write(f"error: {error}\nthe logs are in {folder}\n")
        return 1
    shutil.rmtree(folder)
    from benchmarks import report

    sys.stdout.write(f"{report.table(figures)}\n\n{report.table(memory)}\n")
    if options.write:
        about = report.machine() | {"seed": options.seed, "load": Path("/proc/loadavg").read_text().split()[2]}
        report.write("soak", about, figures)
        report.write("soak-memory", about, memory)
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
