"""A count of the operations that the main thread of this process has begun: forwards, steps, exchanges between ranks.

A rank that runs while its count stands still has hung; of several, the others wait for the one with the lowest count.
heartbeat.py sends the counts to rank 0.

Long work without any of these operations (a scan, a cache, an export) advances a second number, which says that the
rank is not stuck and nothing more: ranks do different amounts of such work, so this number is never compared.
"""

from __future__ import annotations


class Liveness:
    """Written by the main thread (`advance` by its helpers too), read by the heartbeat's thread."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_advances = 0
        self.doing = "start"

    def begin(self, what: str) -> None:
        """Count an operation before it begins. Every rank calls it for the same operations in the same order."""
        self.num_begun += 1
        self.doing = what

    def advance(self, what: str | None = None) -> None:
        """Count a piece of long work that is done, or about to be; any rank, any number of times, from any thread."""
        self.num_advances += 1  # two threads may count one: it only has to change
        if what is not None:
            self.doing = what


LIVENESS = Liveness()  # of this process, so there is one
