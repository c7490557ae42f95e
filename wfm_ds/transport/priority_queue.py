"""A priority queue with unique keys."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

MIN_STALE_ENTRIES = 64  # a heap with fewer outdated entries is not rebuilt

K = TypeVar("K", bound=Hashable)


class PriorityQueue(Generic[K]):
    """Queue of unique keys, lowest priority first. Keys with equal priorities keep their insertion order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []  # (priority, entry number, key)
        self._entry_numbers: dict[K, int] = {}  # the valid heap entry of each key; its other entries are outdated
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._entry_numbers)

    def __contains__(self, key: K) -> bool:
        return key in self._entry_numbers

    def put(self, key: K, priority: float) -> None:
        """Insert the key, or move it to a new priority."""
        self._last_number += 1
        self._entry_numbers[key] = self._last_number
        heapq.heappush(self._heap, (priority, self._last_number, key))
        self._compact()

    def discard(self, key: K) -> None:
        if self._entry_numbers.pop(key, None) is not None:
            self._compact()

    def peek(self) -> K | None:
        """Return the key with the lowest priority, or None if the queue is empty."""
        self._drop_outdated()
        return self._heap[0][2] if self._heap else None

    def pop_due(self, before: float) -> list[K]:
        """Remove and return all keys with a priority below `before`, lowest first."""
        keys = []
        while (key := self.peek()) is not None and self._heap[0][0] < before:
            keys.append(key)
            del self._entry_numbers[key]
            heapq.heappop(self._heap)
        return keys

    def _drop_outdated(self) -> None:
        while self._heap and self._entry_numbers.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entry_numbers) + MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._entry_numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
