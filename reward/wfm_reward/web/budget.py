"""The memory that the port holds for its clients: bodies that arrive, decoded media, media that are not scored yet."""

from __future__ import annotations

import threading

from wfm_reward.web.problem import HttpProblem


class MemoryBudget:
    """The bytes that all requests of one port may hold together. Any thread may use it and its reservations."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """The sum of all reservations."""
        return self._reserved

    def check(self, num_bytes: int) -> None:
        """Raise HttpProblem if this many bytes never fit (413), or not at present (429). Reserves nothing."""
        if num_bytes > self.max_bytes:
            raise too_large(num_bytes, self.max_bytes)
        if self._reserved + num_bytes > self.max_bytes:
            raise full(self.max_bytes)

    def reserve(self, num_bytes: int) -> Reservation:
        """Raises HttpProblem as Reservation.grow does."""
        reservation = Reservation(self)
        reservation.grow(num_bytes)
        return reservation

    def change(self, num_bytes: int) -> bool:
        """Reserve this many bytes more, or fewer if negative. False, and no change, if they do not fit."""
        with self._lock:
            if num_bytes > 0 and self._reserved + num_bytes > self.max_bytes:
                return False
            self._reserved += num_bytes
            return True


class Reservation:
    """The bytes of one request; `release` must be called in the end."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve more before it is allocated. Raises HttpProblem as MemoryBudget.check."""
        most = self._budget.max_bytes
        if self.num_bytes + num_bytes > most:
            raise too_large(self.num_bytes + num_bytes, most)
        if not self._budget.change(num_bytes):
            raise full(most)
        self.num_bytes += num_bytes

    def transferred(self, num_bytes: int) -> Reservation:
        """Return a reservation of this many bytes in place of this one, which is then empty. Raises HttpProblem."""
        if num_bytes > self.num_bytes:
            self.grow(num_bytes - self.num_bytes)
        successor = Reservation(self._budget)
        successor.num_bytes = num_bytes
        self._budget.change(num_bytes - self.num_bytes)
        self.num_bytes = 0
        return successor

    def release(self) -> None:
        """Give back all of it. May be called again."""
        self._budget.change(-self.num_bytes)
        self.num_bytes = 0


def too_large(need: int, most: int) -> HttpProblem:
    detail = f"this request needs {need} bytes at once; this service takes {most}: send fewer items in one"
    return HttpProblem(413, "too_large", detail)


def full(most: int) -> HttpProblem:
    return HttpProblem(429, "full", f"more than {most} bytes of media wait to be scored", retry_after_s=5)
