"""Progress counters of this process. They count the operations that the main thread starts, and other progress.

Operations are forward passes, optimizer steps and collectives. If no rank makes progress for a long time, rank 0 ends
the run and blames the ranks that have started the fewest operations.
"""

from __future__ import annotations


class Liveness:
    """Two counters: started operations, and other signs of progress. The heartbeat thread sends them to rank 0."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_advances = 0
        self.operation = "start"

    def start_operation(self, operation: str) -> None:
        """Count an operation. Call it in the main thread, before the operation starts.

        All ranks must count the same operations in the same order.
        """
        self.num_started += 1
        self.operation = operation

    def record_progress(self, operation: str | None = None) -> None:
        """Record progress of long work. Any thread of any rank may call this at any time."""
        self.num_advances += 1  # not atomic; it only has to change
        if operation is not None:
            self.operation = operation


LIVENESS = Liveness()  # one per process
