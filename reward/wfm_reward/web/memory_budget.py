"""Memory budget of the HTTP server, for arriving bodies and for decoded images and videos that are not yet scored."""

from __future__ import annotations

import threading

from wfm_reward.web.http_problem import HttpProblem


class MemoryBudget:
    """Limit on the bytes that all requests of one server hold. Thread-safe, like its reservations."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Sum of all reservations."""
        return self._reserved

    def check_fits(self, num_bytes: int) -> None:
        """Raise HttpProblem if the bytes can never fit (413) or do not fit now (429).

        Does not reserve them.
        """
        if num_bytes > self.max_bytes:
            raise request_too_large(num_bytes, self.max_bytes)
        if self._reserved + num_bytes > self.max_bytes:
            raise budget_full(self.max_bytes)

    def reserve(self, num_bytes: int) -> Reservation:
        """Reserve bytes. Raises HttpProblem like Reservation.grow."""
        reservation = Reservation(self)
        reservation.grow(num_bytes)
        return reservation

    def try_change(self, num_bytes: int) -> bool:
        """Reserve more bytes, or fewer if `num_bytes` is negative.

        Returns False, and changes nothing, if they do not fit.
        """
        with self._lock:
            if num_bytes > 0 and self._reserved + num_bytes > self.max_bytes:
                return False
            self._reserved += num_bytes
            return True


class Reservation:
    """Reserved bytes of one request. Call `release` when done."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve more bytes; call it before allocating them. Raises HttpProblem like MemoryBudget.check_fits."""
        max_bytes = self._budget.max_bytes
        if self.num_bytes + num_bytes > max_bytes:
            raise request_too_large(self.num_bytes + num_bytes, max_bytes)
        if not self._budget.try_change(num_bytes):
            raise budget_full(max_bytes)
        self.num_bytes += num_bytes

    def transfer(self, num_bytes: int) -> Reservation:
        """Return a new reservation of `num_bytes` that replaces this one, which becomes empty.

        Raises HttpProblem if the bytes do not fit.
        """
        if num_bytes > self.num_bytes:
            self.grow(num_bytes - self.num_bytes)
        successor = Reservation(self._budget)
        successor.num_bytes = num_bytes
        self._budget.try_change(num_bytes - self.num_bytes)
        self.num_bytes = 0
        return successor

    def release(self) -> None:
        """Release all bytes. Idempotent."""
        self._budget.try_change(-self.num_bytes)
        self.num_bytes = 0


def request_too_large(num_bytes: int, max_bytes: int) -> HttpProblem:
    detail = f"this request needs {num_bytes} bytes; the limit is {max_bytes}: send fewer items per request"
    return HttpProblem(413, "too_large", detail)


def budget_full(max_bytes: int) -> HttpProblem:
    return HttpProblem(429, "full", f"more than {max_bytes} bytes are waiting to be scored", retry_after_s=5)
