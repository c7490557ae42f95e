"""A cache of tensors with a limited size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TypeAlias

from torch import Tensor

TensorRow: TypeAlias = dict[str, Tensor]
"""The conditioning of one text, image or video: {name: tensor [1, ...]}."""


class TensorLru:
    """A cache of tensors. It evicts the least recently used ones when it exceeds `max_bytes` bytes.

    The most recently used entry is kept even if it alone is too large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._rows: OrderedDict[Hashable, TensorRow] = OrderedDict()

    def get(self, key: Hashable) -> TensorRow | None:
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def put(self, rows: Mapping[Hashable, TensorRow]) -> None:
        for key, row in rows.items():
            self._bytes += num_bytes(row)
            self._rows[key] = row
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= num_bytes(oldest)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows


def num_bytes(row: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in row.values())
