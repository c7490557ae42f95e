"""Keys in the order of a number each, such as a deadline or a place in a queue. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

SPARE = 64  # outdated places that are not worth a rebuild

K = TypeVar("K", bound=Hashable)


class Agenda(Generic[K]):
    """Each key stands at one place; keys at equal places keep the order in which they were put there.

    `put` and `discard` cost O(log n) on average, `first` and `due` nothing but what they return. A place that is left
    stays in the heap until it comes to the front, or until such places are more than half of the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []  # (place, number, key)
        self._number_of: dict[K, int] = {}  # of the heap's line that holds; others of this key are outdated
        self._next = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, key: K) -> bool:
        return key in self._number_of

    def put(self, key: K, place: float) -> None:
        """Put the key there, wherever it was before."""
        self._next += 1
        self._number_of[key] = self._next
        heapq.heappush(self._heap, (place, self._next, key))
        self._compact()

    def discard(self, key: K) -> None:
        """Remove the key, if it is here."""
        if self._number_of.pop(key, None) is not None:
            self._compact()

    def first(self) -> K | None:
        """The key at the lowest place; None if there is none."""
        self._drop_outdated()
        return self._heap[0][2] if self._heap else None

    def due(self, before: float) -> list[K]:
        """Remove the keys whose places are lower than this; lowest first."""
        keys = []
        while (key := self.first()) is not None and self._heap[0][0] < before:
            keys.append(key)
            del self._number_of[key]
            heapq.heappop(self._heap)
        return keys

    def _drop_outdated(self) -> None:
        while self._heap and self._number_of.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._number_of) + SPARE:
            self._heap = [line for line in self._heap if self._number_of.get(line[2]) == line[1]]
            heapq.heapify(self._heap)
