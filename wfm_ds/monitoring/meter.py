"""Means, maxima and seconds of one step, gathered without a host sync per micro-batch. No files: monitor.py writes."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from wfm_ds.distributed.world import World


class Meter:
    """Weighted figures over all terms of a step and all replicas: means, unless the name says otherwise.

    `x_std` is a population standard deviation; a name with the word `max` (`x_max`, `x_max_abs_dev`) is a maximum.
    Every rank adds the same names in the same order. A name without any weight is absent from the result.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, stats: Mapping[str, Tensor | tuple[Tensor, Tensor]], weight_B: Tensor) -> None:
        """stats: detached [B] tensors, or (value, mask) where a value counts for some terms only; weight_B: [B], 0 for
        dummies."""
        for name, stat in stats.items():
            value_B, of_name_B = (stat[0], weight_B * stat[1]) if isinstance(stat, tuple) else (stat, weight_B)
            if "max" in name.rpartition("/")[2].split("_"):
                biggest = torch.where(of_name_B > 0, value_B.float(), -torch.inf).max()
                self._maxima[name] = torch.maximum(self._maxima[name], biggest) if name in self._maxima else biggest
                continue
            self._book(name, value_B, of_name_B)
            if name.endswith("_std"):
                self._book(f"{name}^2", value_B.double().square(), of_name_B)

    def _book(self, name: str, value_B: Tensor, weight_B: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0) + torch.where(weight_B > 0, value_B * weight_B, 0).double().sum()
        self._weights[name] = self._weights.get(name, 0) + weight_B.double().sum()

    def collect(self, world: World) -> dict[str, float]:
        """The values over all replicas, on every rank; collective. Empties the meter."""
        totals = world.replica_sums(
            {f"s:{n}": float(v) for n, v in self._sums.items()} | {f"w:{n}": float(v) for n, v in self._weights.items()}
        )
        values = {n: totals[f"s:{n}"] / totals[f"w:{n}"] for n in self._sums if totals[f"w:{n}"] > 0}
        for name in [n for n in values if n.endswith("_std")]:
            values[name] = math.sqrt(max(0.0, values.pop(f"{name}^2") - values[name] ** 2))
        values |= {
            n: v for n, v in world.maxima({n: float(v) for n, v in self._maxima.items()}).items() if v > -torch.inf
        }
        self.__init__()  # type: ignore[misc]
        return values


class Stopwatch:
    """Seconds by phase; `lap` gives them as `time/<phase>` and starts the next step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - began

    def lap(self) -> dict[str, float]:
        """Seconds of this rank; every rank has timed the same phases."""
        now = time.monotonic()
        seconds = {f"time/{phase}": s for phase, s in sorted(self._seconds.items())} | {
            "time/step": now - self._started
        }
        self.restart()
        return seconds

    def restart(self) -> None:
        """Forget what was timed so far: it belongs to no step."""
        self._seconds.clear()
        self._started = time.monotonic()
