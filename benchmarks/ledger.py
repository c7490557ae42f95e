"""`python -m benchmarks.ledger`: what a turn of the hub costs its ledger while few or many tasks wait.

A turn is what the hub does for a message when it handles one at a time: look for stalls and deadlines, lease what
waits, tell the client what has finished. Beside the ledger runs one that looks at every task and lease instead of
keeping them in order, in turn, so that both meet the same load.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from wfm_ds.pipes.ledger import Ledger
from wfm_ds.pipes.tasks import Completion, Task, TaskState

KIND, OWNER, WORKER = "score", "run/client", "worker"
CREDIT = 8
RELEASE_EVERY = 100  # results
HOURS_S = 1e5  # later than anything here


class ScanningLedger(Ledger):
    """The baseline: every look is a look at everything."""

    def expire_leases(self, now_s: float) -> list[tuple[str, str, int]]:
        leases = [(name, t, lease) for name, worker in self._workers.items() for t, lease in worker.leases.items()]
        stalled = [(n, t, lease.attempt) for n, t, lease in leases if now_s - lease.progress_at_s > lease.stall_s]
        overdue = [e for e in self._entries.values() if e.state is TaskState.WAITING and now_s > e.task.deadline_s]
        assert not stalled
        assert not overdue, "nothing of this here"
        return stalled

    def new_completions(self, owner: str, after_seq: int) -> list[Completion]:
        return [c for c in self._owners[owner].completions.values() if c.seq > after_seq]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__.split("\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1000, 20000], help="tasks that wait")
    parser.add_argument("--turns", type=int, default=200, help="of one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drain", type=int, default=20000, help="tasks that are done one after the other; 0: none")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args(arguments)
    rows = turns(options.waiting, options.turns, options.rounds)
    if options.drain:
        rows += drains(options.drain)
    from benchmarks import report

    sys.stdout.write(report.table(rows) + "\n")
    if options.write:
        sys.stdout.write(f"{report.write('ledger', report.machine(), rows)}\n")
    return 0


def turns(waiting: Sequence[int], num_turns: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a turn with this many tasks waiting: a task is done, another one comes."""
    rows = []
    for count in waiting:
        peers = {"scan": filled(ScanningLedger, count), "ledger": filled(Ledger, count)}
        found: dict[str, list[float]] = {name: [] for name in peers}
        for round_number in range(rounds):
            for name, ledger in peers.items():
                started = time.perf_counter()
                for number in range(num_turns):
                    ledger.submit(a_task(f"{round_number}/{number}"))
                    turn(ledger)
                found[name].append((time.perf_counter() - started) / num_turns * 1e6)
        for name, values in found.items():
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": rounds}
            rows.append({"peer": name, "waiting": count, "us a turn": spread})
    return rows


def drains(count: int) -> list[dict[str, Any]]:
    """Seconds until this many tasks are done, one in each turn."""
    rows = []
    for name, kind in (("scan", ScanningLedger), ("ledger", Ledger)):
        ledger = filled(kind, count)
        started = time.perf_counter()
        while ledger.has_leases():
            turn(ledger)
        assert ledger.counts["done"] == count
        rows.append({"peer": name, "drained": count, "seconds": time.perf_counter() - started})
    return rows


def filled(kind: type[Ledger], count: int) -> Ledger:
    """A ledger with this many tasks, of which a worker holds as many as it may."""
    ledger = kind({KIND: HOURS_S}, max_waiting=2 * count, max_bytes=2**40)
    for number in range(count):
        ledger.submit(a_task(str(number)))
    ledger.register_worker(WORKER, frozenset([KIND]), CREDIT, ())
    ledger.lease_tasks(0.0)
    return ledger


def a_task(task_id: str) -> Task:
    return Task(task_id, OWNER, KIND, 1, HOURS_S)


def turn(ledger: Ledger) -> None:
    """The worker brings the result of its oldest task; then what the hub does in each turn."""
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
