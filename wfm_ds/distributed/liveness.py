"""Count the operations that the main thread starts: forward passes, optimizer steps, collectives.

heartbeat.py sends the count to rank 0. A running rank with a constant count hangs; the others wait for the rank with
the lowest count. Long work without such operations (scans, caches, exports) increases a second count. The second count
only shows that the rank is not stuck. It is never compared, because ranks do different amounts of this work.
"""

from __future__ import annotations


class Liveness:
    """Counts of operations and of other progress, sent by the heartbeat thread."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_advances = 0
        self.operation = "start"

    def start_operation(self, operation: str) -> None:
        """Count an operation before it starts. Main thread only; all ranks count the same operations in order."""
        self.num_started += 1
        self.operation = operation

    def record_progress(self, operation: str | None = None) -> None:
        """Record progress of long work. Any thread of any rank may call it at any time."""
        self.num_advances += 1  # not atomic; it only has to change
        if operation is not None:
            self.operation = operation


LIVENESS = Liveness()  # one per process
