"""Cost of one broker turn in the ledger, for few or many waiting tasks: `python -m benchmarks.ledger`.

A turn is the work of the broker for one message: look for stalls and deadlines, lease waiting tasks, report finished
tasks to the client. The baseline is a ledger that scans all tasks and leases instead of keeping them sorted. Both take
turns, so that they run under the same load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from wfm_ds.transport.ledger import Ledger
from wfm_ds.transport.tasks import Completion, Task, TaskState

KIND, OWNER, WORKER = "score", "run/client", "worker"
CREDIT = 8
RELEASE_EVERY = 100  # results
HOURS_S = 1e5  # later than any deadline here


class ScanningLedger(Ledger):
    """The baseline: every lookup scans everything."""

    def expire_leases(self, now_s: float) -> list[tuple[str, str, int]]:
        leases = [(name, t, lease) for name, worker in self._workers.items() for t, lease in worker.leases.items()]
        stalled = [(n, t, lease.attempt) for n, t, lease in leases if now_s - lease.progress_at_s > lease.stall_s]
        overdue = [e for e in self._entries.values() if e.state is TaskState.WAITING and now_s > e.task.deadline_s]
        assert not stalled
        assert not overdue, "no task is overdue in this benchmark"
        return stalled

    def new_completions(self, owner: str, after_seq: int) -> list[Completion]:
        return [c for c in self._owners[owner].completions.values() if c.seq > after_seq]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1000, 20000], help="waiting tasks")
    parser.add_argument("--turns", type=int, default=200, help="turns in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drain", type=int, default=20000, help="tasks to finish one by one; 0: skip")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args(arguments)
    rows = measure_turns(options.waiting, options.turns, options.rounds)
    if options.drain:
        rows += measure_drains(options.drain)
    from benchmarks import report

    sys.stdout.write(report.format_table(rows) + "\n")
    if options.write:
        sys.stdout.write(f"{report.write_results('ledger', report.describe_machine(), rows)}\n")
    return 0


def measure_turns(waiting: Sequence[int], num_turns: int, rounds: int) -> list[dict[str, Any]]:
    """Return the microseconds of a turn with a number of waiting tasks: one task finishes, another arrives."""
    rows = []
    for count in waiting:
        peers = {"scan": fill_ledger(ScanningLedger, count), "ledger": fill_ledger(Ledger, count)}
        found: dict[str, list[float]] = {name: [] for name in peers}
        for round_number in range(rounds):
            for name, ledger in peers.items():
                started = time.perf_counter()
                for number in range(num_turns):
                    ledger.submit(make_task(f"{round_number}/{number}"))
                    run_turn(ledger)
                found[name].append((time.perf_counter() - started) / num_turns * 1e6)
        for name, values in found.items():
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": rounds}
            rows.append({"peer": name, "waiting": count, "us a turn": spread})
    return rows


def measure_drains(count: int) -> list[dict[str, Any]]:
    """Return the seconds until all tasks are finished, one in each turn."""
    rows = []
    for name, kind in (("scan", ScanningLedger), ("ledger", Ledger)):
        ledger = fill_ledger(kind, count)
        started = time.perf_counter()
        while ledger.has_leases():
            run_turn(ledger)
        assert ledger.counts["done"] == count
        rows.append({"peer": name, "drained": count, "seconds": time.perf_counter() - started})
    return rows


def fill_ledger(kind: type[Ledger], count: int) -> Ledger:
    """Return a ledger with this many tasks. One worker holds the maximum number of leases."""
    ledger = kind({KIND: HOURS_S}, max_waiting=2 * count, max_bytes=2**40)
    for number in range(count):
        ledger.submit(make_task(str(number)))
    ledger.register_worker(WORKER, frozenset([KIND]), CREDIT, ())
    ledger.lease_tasks(0.0)
    return ledger


def make_task(task_id: str) -> Task:
    return Task(task_id, OWNER, KIND, 1, HOURS_S)


def run_turn(ledger: Ledger) -> None:
    """Return the oldest task of the worker, then do the work of the broker for a turn."""
    held = ledger._workers[WORKER].leases
    task_id = next(iter(held))
    ledger.record_result(WORKER, task_id, held[task_id].attempt, 0.1, {})
    ledger.expire_leases(0.0)
    ledger.lease_tasks(0.0)
    last = ledger._owners[OWNER].last_seq
    ledger.new_completions(OWNER, last - 1)
    if last % RELEASE_EVERY == 0:
        ledger.release_completions(OWNER, last)


if __name__ == "__main__":
    sys.exit(main())
