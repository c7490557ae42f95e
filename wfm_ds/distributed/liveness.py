"""A count of what the main thread of this process has begun: forwards, steps, exchanges with other ranks.

A rank whose count stands still while it runs has hung; of several, the one that began least is the one that the others
wait for. heartbeat.py tells the counts to rank 0.

Work that takes long without any of these (a scan, a cache, an export) shows a second number, which says that the rank
is not stuck and nothing more: ranks do different amounts of it, so that it is never compared.
"""

from __future__ import annotations


class Moves:
    """Written by the main thread (`alive` by its helpers too), read by the heartbeat's."""

    def __init__(self) -> None:
        self.count = 0
        self.signs = 0
        self.doing = "start"

    def begin(self, what: str) -> None:
        """Every rank calls it for the same things in the same order, before it does them."""
        self.count += 1
        self.doing = what

    def alive(self, what: str | None = None) -> None:
        """A piece of some long work is done, or about to be; any rank, any number of times, from any thread."""
        self.signs += 1  # two threads may count one: it only has to change
        if what is not None:
            self.doing = what


MOVES = Moves()  # of this process, so there is one
