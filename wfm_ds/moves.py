"""A count of what the main thread of this process has begun: forwards, steps, exchanges with other ranks.

A rank whose count stands still while it runs has hung; of several, the one that began least is the one that the others
wait for. heartbeat.py tells the counts to rank 0.
"""

from __future__ import annotations


class Moves:
    """Written by the main thread, read by the heartbeat's."""

    def __init__(self) -> None:
        self.count = 0
        self.doing = "start"

    def begin(self, what: str) -> None:
        """Every rank calls it for the same things in the same order, before it does them."""
        self.count += 1
        self.doing = what


MOVES = Moves()  # of this process, so there is one
