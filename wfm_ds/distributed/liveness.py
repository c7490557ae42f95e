"""Count the operations started by the main thread: forward passes, steps, collectives.

heartbeat.py sends the counts to rank 0. A running rank with a constant count hangs; the others wait for the rank with
the lowest count. Long work without such operations (scans, caches, exports) increases a second count. It only shows
that the rank is not stuck and is never compared, because ranks do different amounts of this work.
"""

from __future__ import annotations


class Liveness:
    """Operation counts: written by the main thread (`record_progress` by any thread), read by the heartbeat thread."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_advances = 0
        self.operation = "start"

    def start_operation(self, operation: str) -> None:
        """Count an operation before it starts. All ranks must call it for the same operations in the same order."""
        self.num_started += 1
        self.operation = operation

    def record_progress(self, operation: str | None = None) -> None:
        """Record progress of long work. Any rank, any number of times, from any thread."""
        self.num_advances += 1  # not atomic; it only has to change
        if operation is not None:
            self.operation = operation


LIVENESS = Liveness()  # one per process
